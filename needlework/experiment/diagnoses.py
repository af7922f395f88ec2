"""The papers' diagnoses of a trained model, on held-out text with one needle in it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from needlework import diagnostics
from needlework.data import Corpus, held_out_text
from needlework.data.rng import generator
from needlework.data.tokenizer import encode
from needlework.experiment.reader import as_trained
from needlework.models import NeedleworkForCausalLM

Once = Callable[[str, Callable[[], Any]], Any]  # name, what makes the piece -> the piece, made now or before


def diagnose(
    model: NeedleworkForCausalLM,
    corpus: Corpus,
    T: int,
    lengths: tuple[int, ...],
    seed: int,
    once: Once,
    ask: Callable[[], None],
) -> dict[str, Any]:
    """{diagnosis: one dict a layer} of the rules that the model has, on rows of T tokens, and the norm of recurrent states at each of
    `lengths`. once keeps each diagnosis. ask is called at every token of a walk; what it raises ends the walk."""
    assert model.config.mixers is not None  # a dict once the config is made
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
        text = held_out_text(corpus, seed, 1, lengths[-1]).input_ids
        with as_trained(model.device):  # in float32 attention to 64K tokens would make their scores
            return {str(T): by_layer for T, by_layer in diagnostics.state_norms(model, text, lengths).items()}

    by_length = once("state norms", norms)
    if any(by_length.values()):
        report["state_norms"] = by_length
    return report


def check_diagnosis(mixers: dict[str, dict[str, Any]], corpus: Corpus, T: int, seed: int) -> None:
    """Raises the ValueErrors that `diagnose` would raise for a model with `mixers`."""
    ids, needle = needle_in_text(corpus, seed, T)
    for mixer in mixers.values():
        write = mixer.get("write", {})
        if mixer.get("read", {}).get("kind") == "ccq":
            diagnostics.rare(ids, needle)
        if write.get("kind") == "carve" and (write["write_rank"], write["prediction"]) != (1, "previous"):
            raise ValueError(
                "evaluate.diagnose: CARVE's diagnosis is of write_rank 1 and prediction 'previous', the model has "
                f"{write['write_rank']} and {write['prediction']!r}; expected None"
            )


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
