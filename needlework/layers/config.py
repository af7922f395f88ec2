"""Component configs: frozen dataclasses with a `kind`, to plain dicts and back, so that config.json holds a whole model."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from needlework.fields import fit
from needlework.layers.batch import Batch
from needlework.layers.state import Held


class Width(NamedTuple):
    """What a rule must know of the layer around it. value_heads is a multiple of heads; layer counts from 0."""

    dim: int  # D
    heads: int  # H
    value_heads: int  # HV
    key_dim: int  # K
    value_dim: int  # V
    bias: bool = False
    scale: float | None = None  # of the read; None is K^-1/2
    layer: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A component that its config builds. Fields hold numbers, strings, None, tuples of those, or other Configs.

    Raises ValueError for a field that does not have its type and range (`needlework/fields.py`), naming the kind, the field, the
    value and the range.

    >>> from needlework.layers import Softmax, from_dict
    >>> Softmax(window=64).to_dict()
    {'kind': 'softmax', 'window': 64, 'scale': None}
    >>> from_dict(Softmax(window=64).to_dict()) == Softmax(window=64)
    True
    """

    kind: ClassVar[str]

    def __post_init__(self):
        fit(self.kind, self)

    def to_dict(self) -> dict[str, Any]:
        """{"kind": …, field: value, …}, nested; JSON-ready."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"kind": self.kind} | {
            name: value.to_dict() if isinstance(value, Config) else list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


class Mixer(nn.Module):
    """Base of the mixers: `forward` in training and for `generate`, `serve` where an engine owns the states.

    late: whether `serve` takes a `Later` too, a norm that its first product makes.
    """

    late = False

    def held(self, dtype: torch.dtype) -> Held:
        """What the layer holds of a sequence, the model in `dtype`."""
        raise NotImplementedError

    def serve(self, x: Tensor, tables: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """y [T D] of the new tokens x [T D] of many sequences, without gradients; their states advance in place.

        tables: by the names of `held`: [slots …] of what is fixed, [pages PG …] of rows. A slot and a page are contiguous.
        """
        raise NotImplementedError

    def state_size(self, T: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's state after T tokens, the model in `dtype`."""
        return self.held(dtype).nbytes(T)


class MixerConfig(Config):
    """Base of the mixers' configs."""

    def build(self, dim: int, layer: int = 0) -> Mixer:
        """The mixer of layer `layer`, from 0: `forward(x [B T dim], state, cu_seqlens, output_final_state) -> (y, state)`."""
        raise NotImplementedError


def nearest(word: object, known: list[str]) -> str:
    """ " (did you mean 'x'?)" or nothing."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def from_dict(data: dict[str, Any], kinds: tuple[type[Config], ...]) -> Config:
    """The Config that `to_dict` wrote. ValueError for an unknown kind or field, with the nearest known name, and a missing field."""
    known = {k.kind: k for k in kinds}
    kind = data.get("kind")
    if kind not in known:
        raise ValueError(f"unknown kind {kind!r}{nearest(kind, list(known))}; known: {', '.join(sorted(known))}")
    fields = [f.name for f in dataclasses.fields(known[kind])]
    needed = [f.name for f in dataclasses.fields(known[kind]) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{kind}: {', '.join(missing)} is missing; known: {', '.join(fields)}")
    values = {}
    for name, value in data.items():
        if name == "kind":
            continue
        if name not in fields:
            raise ValueError(f"{kind}: unknown field {name!r}{nearest(name, fields)}; known: {', '.join(fields)}")
        if isinstance(value, dict):
            value = from_dict(value, kinds)
        values[name] = tuple(value) if isinstance(value, list) else value
    return known[kind](**values)
