"""Looking inside a checkpoint: every diagnosis that its rules have, on the tokens of a text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from needlework import diagnostics
from needlework.data import load_tokenizer
from needlework.data.tokenizer import encode
from needlework.diagnostics.overwrite import SHARES
from needlework.experiment.pretrained import load_model
from needlework.layers import Attention, Mamba, Mamba3, Recurrent
from needlework.layers.config import MixerConfig
from needlework.models import NeedleworkForCausalLM
from needlework.report.look import ByLayer, Look, Map

LEAST, SHOWN = 64, 96  # tokens: of a text, of a map
NEEDLE = " The locker number of amber-lantern is 4815162."
CHUNKS = (16, 32, 64, 128)


def look(folder: Path, text: Path, tokens: int = 1024) -> Look:
    """What is inside the model of a checkpoint's folder when it reads the first `tokens` tokens of a file of text.

    ValueError for a file that is no text, or has less than 64 tokens; and for a folder that is no checkpoint.
    """
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder / "tokenizer.json")
    try:
        ids = encode(tokenizer, text.read_text(encoding="utf-8"))[:tokens]
    except UnicodeDecodeError as error:
        raise ValueError(f"{text}: expected text in UTF-8 ({error})") from None
    if len(ids) < LEAST:
        raise ValueError(f"{text}: {len(ids)} tokens, expected at least {LEAST}")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").float()  # pyrefly: ignore[bad-argument-type, missing-argument] (wrapped by transformers)
    row = torch.from_numpy(np.asarray(ids))[None]
    mixers, notes = model.config.each_layer(), list[str]()
    rules = _rules(model, row, mixers, encode(tokenizer, NEEDLE), notes)
    maps = [Map(one.layer, one.rule, one.weights.numpy(force=True)) for one in diagnostics.maps(model, row[:, :SHOWN])]
    if any(rule.endswith("gdn2") for rule in (one.rule for one in maps)):
        notes.append("GDN-2 writes a gate a value channel; its map has their mean.")
    return Look(
        name=folder.resolve().name if folder.resolve().name != "checkpoint" else folder.resolve().parent.name,
        layers=[_words(mixer) for mixer in mixers],
        text=f"{row.shape[1]:,} tokens of {text.name}",
        rules=rules,
        norms=_norms(model, row, mixers),
        overwrite=_overwrite(model, row),
        chunks=_chunks(model, row, mixers),
        maps=maps,
        words=tokenizer.decode(row[0, :SHOWN].tolist(), skip_special_tokens=False),
        notes=notes,
    )


def _rules(
    model: NeedleworkForCausalLM, row: Tensor, mixers: Sequence[MixerConfig], needle: np.ndarray, notes: list[str]
) -> dict[str, ByLayer]:
    """Each rule's diagnosis, by layer; what a diagnosis refuses becomes a note."""
    short = row[:, : min(1024, row.shape[1])]
    windows = [kind.window for kind in map(_attend, mixers) if kind is not None and kind.window is not None]
    content = {write.content_chunk for write in map(_write, mixers) if write is not None and write.kind == "carve"}
    made: dict[str, tuple[Callable[[Any], bool], Callable[[], list[Any]]]] = {
        "qdelta": (lambda m: _is(_write(m), "qdelta"), lambda: diagnostics.qdelta(model, row)),
        "ccq": (lambda m: _is(_read(m), "ccq"), lambda: diagnostics.ccq(model, *with_needle(row, needle))),
        "carve": (lambda m: _is(_write(m), "carve"), lambda: diagnostics.carve(model, row, *content)),
        "lucid": (lambda m: _is(_attend(m), "lucid", "lucid_path"), lambda: diagnostics.lucid(model, short)),
        "polar": (lambda m: _is(_attend(m), "polar"), lambda: diagnostics.polar(model, short[:, : min([1024, *windows])])),
    }
    found = {}
    for rule, (has, make) in made.items():
        layers = [n for n, mixer in enumerate(mixers) if has(mixer)]
        if not layers:
            continue
        try:
            values = [one._asdict() for one in make()]
        except (ValueError, TypeError) as error:
            notes.append(f"{rule}: not looked at: {error}")
            continue
        found[rule] = ByLayer(layers, {name.replace("_", " "): [float(one[name]) for one in values] for name in values[0]})
    return found


def with_needle(row: Tensor, needle: np.ndarray) -> tuple[Tensor, Tensor]:
    """The row [1 T] with a sentence in its middle, as many tokens long, and where the sentence is."""
    at, n = row.shape[1] // 2, len(needle)
    ids = torch.cat([row[:, :at], torch.from_numpy(needle)[None], row[:, at : row.shape[1] - n]], 1)
    inside = torch.zeros_like(ids, dtype=torch.bool)
    inside[:, at : at + n] = True
    return ids, inside


def _norms(model: NeedleworkForCausalLM, row: Tensor, mixers: Sequence[MixerConfig]) -> ByLayer | None:
    layers = [n for n, mixer in enumerate(mixers) if _write(mixer) is not None or isinstance(mixer, Mamba | Mamba3)]
    if not layers:
        return None
    T = row.shape[1]
    lengths = tuple(sorted({*(2**n for n in range(4, T.bit_length()) if 2**n < T), T}))
    norms = diagnostics.state_norms(model, row, lengths)
    return ByLayer(layers, {str(length): values for length, values in norms.items()})


def _overwrite(model: NeedleworkForCausalLM, row: Tensor) -> ByLayer | None:
    found = diagnostics.overwrite(model, row)
    shares = [share for share in SHARES if all(share in one.error for one in found)]
    if not found or not shares:
        return None
    return ByLayer([one.layer for one in found], {str(share): [one.error[share] for one in found] for share in shares})


def _chunks(model: NeedleworkForCausalLM, row: Tensor, mixers: Sequence[MixerConfig]) -> ByLayer | None:
    writes = [write for write in map(_write, mixers) if write is not None and write.kind == "carve"]
    if not writes or any((write.write_rank, write.prediction) != (1, "previous") for write in writes):
        return None
    found = diagnostics.chunkability(model, row[:, :512], CHUNKS)
    layers = [n for n, mixer in enumerate(mixers) if _is(_write(mixer), "carve")]
    return ByLayer(layers, {str(L): values for L, values in found.items()})


def _write(mixer: MixerConfig) -> Any:
    """The write rule's config: the mixer's, or its memory's; None."""
    memory = mixer.memory if isinstance(mixer, Attention) else None
    return mixer.write if isinstance(mixer, Recurrent) else None if memory is None else memory.write


def _read(mixer: MixerConfig) -> Any:
    memory = mixer.memory if isinstance(mixer, Attention) else None
    return mixer.read if isinstance(mixer, Recurrent) else None if memory is None else memory.read


def _attend(mixer: MixerConfig) -> Any:
    return mixer.attend if isinstance(mixer, Attention) else None


def _is(rule: Any, *kinds: str) -> bool:
    return rule is not None and rule.kind in kinds


def _words(mixer: MixerConfig) -> str:
    """A layer in words: "qdelta + ccq", "polar + memory of delta", "gated_conv"."""
    attend, write, read = _attend(mixer), _write(mixer), _read(mixer)
    parts = [attend.kind] if attend is not None else []
    parts += [f"memory of {write.kind}" if parts else write.kind] if write is not None else []
    parts += [read.kind] if read is not None and read.kind != "plain" else []
    return " + ".join(parts) or mixer.kind
