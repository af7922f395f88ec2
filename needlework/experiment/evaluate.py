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
from torch import Tensor, nn

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
from needlework.eval.samples import samples
from needlework.fields import AtLeastTwo, Count, Natural, fit
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
    Raises ValueError for a number out of its range, lengths that do not ascend, a task that is not known.
    """

    lengths: tuple[Count, ...] = (256, 512, 1024, 2048)
    tokens: Count = 32_768
    rows: Count = 16
    tasks: tuple[str, ...] = ("needle", "needles")
    positions: Count | None = None
    diagnose: AtLeastTwo | None = None
    full_context: bool = False
    seed: Natural = 1

    def __post_init__(self):
        fit("evaluate", self)
        for name in self.tasks:
            if name not in TASKS:
                raise ValueError(f"evaluate: unknown task {name!r}; known: {', '.join(TASKS)}")
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(
                f"evaluate: lengths is {self.lengths}, expected at least one number of tokens, each more than the last"
            )


class Stopped(Exception):
    """Asked to stop in the middle of a measurement."""


Once = Callable[[str, Callable[[], Any]], Any]  # name, what makes the piece -> the piece, made now or before


def measure(
    model: NeedleworkForCausalLM,
    corpus: Corpus,
    evaluation: Evaluation,
    once: Once = lambda name, make: make(),
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """{"loss": {T: nats}, task: {T: score}, "positions": …, "diagnostics": …} of a model, which is put in evaluation mode.

    once: keeps pieces, each a number or JSON: every length's loss, every task at every length, … stop: asked before each module's
    forward, and at every token of a diagnosis; Stopped is raised when it is True.
    """
    e = evaluation
    model.eval()
    read = reader(model)
    entry: dict[str, Any] = {"loss": {}} | {task: {} for task in e.tasks}

    def ask(*_: Any) -> None:
        if stop():
            raise Stopped

    with asking(model, ask):
        for T in e.lengths:
            size = at_once(model, T)
            entry["loss"][str(T)] = once(
                f"loss {T}", lambda T=T, size=size: loss(read, running(corpus, e, T), batch_size=size).mean
            )
            for task in e.tasks:
                asked = lambda task=task, T=T, size=size: retrieval(
                    read, questions(corpus, e, task, T), batch_size=size
                )._asdict()
                entry[task][str(T)] = once(f"{task} {T}", asked)
        entry["samples"] = once("samples", lambda: go_on(read, corpus, e))
        if e.positions is not None:
            entry["positions"] = once("positions", lambda: by_position(read, corpus, e, at_once(model, e.positions)))
        if e.diagnose is not None:
            entry["diagnostics"] = diagnose(model, corpus, e, once, ask)
    return entry


@contextmanager
def asking(model: nn.Module, ask: Callable[..., None]) -> Iterator[None]:
    """`ask` is called before every module's forward: a pass over long rows takes too long to wait for."""
    hooks = [module.register_forward_pre_hook(ask) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def running(corpus: Corpus, evaluation: Evaluation, T: int) -> Tensor:
    """The held-out text whose loss is measured at T, [n T+1]."""
    return held_out_text(corpus, evaluation.seed, max(1, evaluation.tokens // T), T + 1).input_ids


def questions(corpus: Corpus, evaluation: Evaluation, task: str, T: int) -> Episodes:
    """What a task asks at T: as many tokens as the loss reads, at least `rows` rows."""
    return TASKS[task](corpus, evaluation.seed, max(evaluation.rows, evaluation.tokens // T), T)


def documents(corpus: Corpus, evaluation: Evaluation) -> Tensor:
    """The long documents whose loss is measured by position, [rows positions+1]."""
    return long_documents(corpus, evaluation.rows, evaluation.positions + 1).input_ids


def check_measurement(mixers: dict[str, dict[str, Any]], corpus: Corpus, evaluation: Evaluation) -> None:
    """ValueError for what `measure` would stumble over, of a model with `mixers`: every row that it reads is made, as it makes them."""
    e = evaluation
    for T in e.lengths:
        running(corpus, e, T)
        for task in e.tasks:
            questions(corpus, e, task, T)
    if e.positions is not None:
        documents(corpus, e)
    if e.diagnose is not None:
        ids, needle = needle_in_text(corpus, e.seed, e.diagnose)
        for mixer in mixers.values():
            write = mixer.get("write", {})
            if mixer.get("read", {}).get("kind") == "ccq":
                diagnostics.rare(ids, needle)
            if write.get("kind") == "carve" and (write["write_rank"], write["prediction"]) != (1, "previous"):
                raise ValueError(
                    "evaluate.diagnose: CARVE's diagnosis is of write_rank 1 and prediction 'previous', the model has "
                    f"{write['write_rank']} and {write['prediction']!r}; expected None"
                )


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


def go_on(read: Callable, corpus: Corpus, evaluation: Evaluation) -> list[dict[str, str]]:
    """A few samples: 64 tokens of held-out text, and the next 32; of shorter rows two thirds and the rest."""
    n = max(2, min(96, evaluation.lengths[-1]))
    rows = held_out_text(corpus, evaluation.seed, 3, n).input_ids
    return samples(read, rows, 2 * n // 3, partial(corpus.tokenizer.decode, skip_special_tokens=False))


def by_position(read: Callable, corpus: Corpus, evaluation: Evaluation, batch_size: int) -> dict[str, Any]:
    """Nats per token of long documents in stretches that double: {"from": [0, 128, 256, …], "loss": […], "rows": n}."""
    T = evaluation.positions
    rows = documents(corpus, evaluation)
    cuts = [1 << n for n in range(7, T.bit_length() - (T & (T - 1) == 0))]
    found = loss(read, rows, batch_size=batch_size, buckets=tuple(cuts))
    return {"from": [0, *cuts], "loss": list(found.by_position), "rows": len(rows)}


def diagnose(
    model: NeedleworkForCausalLM, corpus: Corpus, evaluation: Evaluation, once: Once, ask: Callable[[], None]
) -> dict[str, Any]:
    """{diagnosis: one dict a layer} of the rules that the model has, and the norm of recurrent states at each length."""
    T, seed = evaluation.diagnose, evaluation.seed
    ids, needle = needle_in_text(corpus, seed, T)
    chunks = {m["write"]["content_chunk"] for m in model.config.mixers.values() if m.get("write", {}).get("kind") == "carve"}
    made = {
        "qdelta": lambda: diagnostics.qdelta(model, ids, ask),
        "ccq": lambda: diagnostics.ccq(model, ids, needle),
        "carve": lambda: [layer for L in chunks for layer in diagnostics.carve(model, ids, L, ask)],
        "lucid": lambda: diagnostics.lucid(model, ids[:1, :1024]),
        "polar": lambda: diagnostics.polar(model, ids[:, :1024]),
    }
    found = {rule: once(rule, lambda make=make: [layer._asdict() for layer in make()]) for rule, make in made.items()}
    report = {rule: layers for rule, layers in found.items() if layers}

    def norms() -> dict[str, list[float]]:
        text = held_out_text(corpus, seed, 1, evaluation.lengths[-1]).input_ids
        with as_trained(model.device):  # in float32 attention to 64K tokens would make their scores
            return {str(T): by_layer for T, by_layer in diagnostics.state_norms(model, text, evaluation.lengths).items()}

    by_length = once("state norms", norms)
    if any(by_length.values()):
        report["state_norms"] = by_length
    return report


def needle_in_text(corpus: Corpus, seed: int, T: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Held-out text [rows T] with one sentence of RULER's kind in it, and where its tokens are, [rows T] bool."""
    ids, inside = [], []
    for row in range(rows):
        rng = generator("needle in text", seed, 0, row)
        sentence = encode(corpus.tokenizer, f" The locker number of amber-lantern is {rng.integers(10**6, 10**7)}.")
        if len(sentence) > T:
            raise ValueError(f"needle in text: T = {T} is too short for its sentence of {len(sentence)} tokens")
        text = corpus.held_out.sample(rng, T - len(sentence))
        at = rng.integers(len(text) // 4, 3 * len(text) // 4 + 1)
        ids.append(np.insert(text, at, sentence))
        inside.append((np.arange(T) >= at) & (np.arange(T) < at + len(sentence)))
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(inside))
