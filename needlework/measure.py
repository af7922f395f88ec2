"""What is measured of a trained model, at which lengths: loss, retrieval by task, loss by position, the papers' diagnoses.

Knows which tasks there are by name; how each is made and scored are other rooms'.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from needlework import diagnostics
from needlework.data import (
    MULTI_KEY,
    NUMBER,
    PASSKEY,
    UUID,
    Corpus,
    Episodes,
    Ruler,
    held_out_text,
    induction_needle,
    long_documents,
    many_needles,
    single_needle,
)
from needlework.data.rng import generator
from needlework.data.tokenizer import encode
from needlework.eval import loss, retrieval
from needlework.models import NeedleworkForCausalLM
from needlework.ops.common.attention import fastest


def _ruler(task: Ruler) -> Callable[..., Episodes]:
    return lambda corpus, seed, rows, T: task.episodes(corpus, seed, rows, T).episodes


def _induction(corpus: Corpus, seed: int, rows: int, T: int) -> Episodes:
    around = induction_needle(corpus, seed, 1, 1).input_ids.shape[1] - 1  # the two cues and values of this seed
    return induction_needle(corpus, seed, rows, T - around)


# name -> (corpus, seed, rows, T) -> episodes of T tokens
TASKS: dict[str, Callable[[Corpus, int, int, int], Episodes]] = {
    "needle": single_needle,
    "needles": partial(many_needles, n=4),
    **{f"needles-{n}": partial(many_needles, n=n) for n in (2, 8)},
    "passkey": _ruler(PASSKEY),
    "number": _ruler(NUMBER),
    "uuid": _ruler(UUID),
    "multikey": _ruler(MULTI_KEY),
    "induction": _induction,
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured at each of `lengths`: `tokens` tokens of held-out text, and at least `rows` rows of each of `tasks`.

    tasks: names of TASKS. "needles" asks four at once.
    positions: the loss by position in rows of this many tokens of one long held-out document; None for not at all.
    diagnose: the papers' diagnoses, on rows of this many tokens of held-out text; None for none.
    full_context: measure a model trained with windows a second time without them.
    Raises ValueError for a task that is not known.
    """

    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    tokens: int = 32_768
    rows: int = 16
    tasks: tuple[str, ...] = ("needle", "needles")
    positions: int | None = None
    diagnose: int | None = None
    full_context: bool = False
    seed: int = 1

    def __post_init__(self):
        for name in self.tasks:
            if name not in TASKS:
                raise ValueError(f"evaluate: unknown task {name!r}; known: {', '.join(TASKS)}")


def measure(model: NeedleworkForCausalLM, corpus: Corpus, evaluation: Evaluation) -> dict[str, Any]:
    """{"loss": {T: nats}, task: {T: score}, "positions": …, "diagnostics": …} of a model, which is put in evaluation mode."""
    e = evaluation
    model.eval()
    read = reader(model)
    entry: dict[str, Any] = {"loss": {}} | {task: {} for task in e.tasks}
    for T in e.lengths:
        rows, size = max(e.rows, e.tokens // T), at_once(model, T)
        text = held_out_text(corpus, e.seed, max(1, e.tokens // T), T + 1).input_ids
        entry["loss"][str(T)] = loss(read, text, batch_size=size).mean
        for task in e.tasks:
            episodes = TASKS[task](corpus, e.seed, rows, T)
            entry[task][str(T)] = retrieval(read, episodes, batch_size=size)._asdict()
    if e.positions is not None:
        entry["positions"] = by_position(read, corpus, e, at_once(model, e.positions))
    if e.diagnose is not None:
        entry["diagnostics"] = diagnose(model, corpus, e)
    return entry


def reader(model: NeedleworkForCausalLM) -> Callable[[Tensor], Tensor]:
    """input_ids [B T] -> logits, without a cache; on a GPU in bfloat16, as it was trained."""
    device = model.device

    def read(ids: Tensor) -> Tensor:
        with as_trained(device):
            return model(ids.to(device), use_cache=False).logits

    return read


@contextmanager
def as_trained(device: torch.device) -> Iterator[None]:
    """On a GPU in bfloat16, attention by the kernels of training: lengths are few here too."""
    if device.type != "cuda":
        yield
    else:
        with torch.autocast("cuda", torch.bfloat16), fastest():
            yield


def at_once(model: NeedleworkForCausalLM, T: int) -> int:
    """Rows of T tokens in a forward pass: those whose logits a quarter of the GPU holds, each as the model gives it, in float32 and in
    a softmax, and 32 bits count. A long row alone leaves most of a GPU idle where its chunks wait for one another."""
    if model.device.type != "cuda":
        return max(1, 8_192 // T)
    memory = torch.cuda.get_device_properties(model.device).total_memory
    return max(1, min(memory // 64, 2**31 - 1) // (model.config.vocab_size * T))


def by_position(read: Callable, corpus: Corpus, evaluation: Evaluation, batch_size: int) -> dict[str, Any]:
    """Nats per token of long documents in stretches that double: {"from": [0, 128, 256, …], "loss": […], "rows": n}."""
    T = evaluation.positions
    rows = long_documents(corpus, evaluation.rows, T + 1).input_ids
    cuts = [1 << n for n in range(7, T.bit_length() - (T & (T - 1) == 0))]
    found = loss(read, rows, batch_size=batch_size, buckets=tuple(cuts))
    return {"from": [0, *cuts], "loss": list(found.by_position), "rows": len(rows)}


def diagnose(model: NeedleworkForCausalLM, corpus: Corpus, evaluation: Evaluation) -> dict[str, Any]:
    """{diagnosis: one dict a layer} of the rules that the model has, and the norm of recurrent states at each length."""
    T, seed = evaluation.diagnose, evaluation.seed
    ids, needle = needle_in_text(corpus, seed, T)
    chunks = {m["write"]["content_chunk"] for m in model.config.mixers.values() if m.get("write", {}).get("kind") == "carve"}
    found: dict[str, Any] = {
        "qdelta": diagnostics.qdelta(model, ids),
        "ccq": diagnostics.ccq(model, ids, needle),
        "carve": [layer for L in chunks for layer in diagnostics.carve(model, ids, L)],
        "lucid": diagnostics.lucid(model, ids[:1, :1024]),
        "polar": diagnostics.polar(model, ids[:, :1024]),
    }
    report = {rule: [layer._asdict() for layer in layers] for rule, layers in found.items() if layers}
    text = held_out_text(corpus, seed, 1, evaluation.lengths[-1]).input_ids
    with as_trained(model.device):  # in float32 attention to 64K tokens would make their scores
        norms = diagnostics.state_norms(model, text, evaluation.lengths)
    if any(norms.values()):
        report["state_norms"] = {str(T): by_layer for T, by_layer in norms.items()}
    return report


def needle_in_text(corpus: Corpus, seed: int, T: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Held-out text [rows T] with one sentence of RULER's kind in it, and where its tokens are, [rows T] bool."""
    ids, inside = [], []
    for row in range(rows):
        rng = generator("needle in text", seed, 0, row)
        sentence = encode(corpus.tokenizer, f" The locker number of amber-lantern is {rng.integers(10**6, 10**7)}.")
        text = corpus.held_out.sample(rng, T - len(sentence))
        at = rng.integers(len(text) // 4, 3 * len(text) // 4 + 1)
        ids.append(np.insert(text, at, sentence))
        inside.append((np.arange(T) >= at) & (np.arange(T) < at + len(sentence)))
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(inside))
