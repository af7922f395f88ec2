"""What vLLM holds of a model and what it says of a step, as layers take it. Nothing here imports vLLM.

vLLM knows two kinds of cache, of one size each: a *slot* of a sequence, and a *page* of so many tokens. Each is bytes to it. `Plan` puts
the tensors of all layers side by side in few of them, *bins*.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.layers.batch import Batch, Pages
from needlework.layers.config import Mixer
from needlework.layers.state import Held, Part, size
from needlework.models.config import NeedleworkConfig
from needlework.serve.tables import line

LINE = 16  # numbers, of which a row has a multiple: as many in every dtype, for vLLM asks before it knows the dtype

Bins = tuple[tuple[int, ...], ...]


class Plan(NamedTuple):
    """What vLLM holds of a model. slots, pages: the layers of each bin; slot_bytes: of a bin's slot, row_bytes: of a token in a bin's
    page."""

    held: Sequence[Held]  # by layer
    slots: Bins
    pages: Bins
    slot_bytes: int
    row_bytes: int

    @classmethod
    def of(cls, config: NeedleworkConfig, dtype: torch.dtype) -> "Plan":
        with torch.device("meta"):
            mixers = {letter: config.mixer(letter).build(config.hidden_size) for letter in dict.fromkeys(config.layout)}
        built = {letter: mixer.held(dtype) for letter, mixer in mixers.items()}
        held = [built[letter] for letter in config.layout]
        numbers = {letter: _numbers(one) for letter, one in mixers.items()}
        rows = {i: numbers[letter] * size(dtype) for i, letter in enumerate(config.layout) if built[letter].rows}
        fixed = {i: line((i, name, part) for name, part in one.fixed.items()).nbytes for i, one in enumerate(held) if one.fixed}
        pages = bins(rows)
        slots = bins(fixed, max(1, len(pages)))
        fullest = lambda filled, sizes: max((sum(sizes[layer] for layer in layers) for layers in filled), default=0)
        return cls(held, slots, pages, fullest(slots, fixed), fullest(pages, rows))

    def tables(self, slots: Sequence[Tensor], pages: Sequence[Tensor], page: int) -> list[dict[str, Tensor]]:
        """Each layer's tables by name, in the bins' slots [n slot_bytes] and pages of `page` rows [n page · row_bytes], uint8."""
        layers: list[dict[str, Tensor]] = [{} for _ in self.held]
        for own, cache in zip(self.slots, slots, strict=True):
            line((i, name, part) for i in own for name, part in self.held[i].fixed.items()).spread(cache, layers)
        for own, cache in zip(self.pages, pages, strict=True):
            rows = ((i, name, part) for i in own for name, part in self.held[i].rows.items())
            line((i, name, Part((page, *part.shape), part.dtype)) for i, name, part in rows).spread(cache, layers)
        return layers


def bins(sizes: Mapping[int, int], multiple: int = 1) -> Bins:
    """Layers of these bytes in bins about as large as the largest layer, a multiple of `multiple` of them where they are enough: vLLM
    pads every bin to the fullest, and makes groups of as many bins as there are of the rarer kind."""
    if not sizes:
        return ()
    count = min(len(sizes), multiple * max(1, sum(sizes.values()) // (multiple * max(sizes.values()))))
    filled: list[list[int]] = [[] for _ in range(count)]
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):  # the largest first, into the emptiest
        min(filled, key=lambda layers: sum(sizes[other] for other in layers)).append(layer)
    return tuple(map(tuple, filled))


def bin_of(layer: int, filled: Bins) -> int | None:
    """The bin of a layer; None: it holds nothing of the kind."""
    return next((i for i, layers in enumerate(filled) if layer in layers), None)


def _numbers(mixer: Mixer) -> int:
    """Numbers of a token's row in a bin: as many in every dtype, also where a part of a half-precision model's row is float32."""
    of = lambda dtype: sum(map(_room, mixer.held(dtype).rows.values())) // size(dtype)
    return max(of(torch.float32), of(torch.bfloat16))


def _room(part: Part) -> int:
    """Bytes of a token's part of a row. A page has a multiple of 16 rows, so its tensors then begin where `line` lets them."""
    return -(-prod(part.shape) // LINE) * LINE * size(part.dtype)


class Step(NamedTuple):
    """What vLLM says of a step to the layers of one of its groups, which share slots or pages.

    sequences: as `Batch` has them. slots [N], of a group of slots; pages, of a group of pages; T tokens, padded ones left out.
    """

    decodes: int
    fresh: Tensor
    cu_seqlens: Tensor
    length: Tensor
    T: int
    slots: Tensor | None = None
    pages: Pages | None = None

    @classmethod
    def of(
        cls, ends: Tensor, length: Tensor, on_host: tuple[Tensor, Tensor], T: int, slots: Tensor | None = None, pages: Pages | None = None
    ) -> "Step":  # fmt: skip
        """ends [N + 1]: where the sequences' new tokens begin; length [N]: tokens of each, the new ones included; on_host: both again.

        Nothing is read back from the device.
        """
        counts = on_host[0].diff()
        D = decodes(counts.tolist(), (on_host[1] - counts).tolist())
        return cls(D, length - ends.diff() == 0, ends[D:].long() - D, length.int(), T, slots, pages)

    def batch(self, positions: Tensor, pages: "Step | None", windows: set[int | None]) -> Batch:
        """The Batch of layers with these slots, if any, and `pages`' pages, which serve every window: vLLM frees none of them."""
        found = {} if pages is None or pages.pages is None else dict.fromkeys(windows, pages.pages)
        return Batch(
            decodes=self.decodes, slots=torch.full_like(self.length, -1).long() if self.slots is None else self.slots,
            fresh=self.fresh, cu_seqlens=self.cu_seqlens, length=self.length, positions=positions, pages=found,
        )  # fmt: skip


def decodes(new: Sequence[int], before: Sequence[int]) -> int:
    """How many of the first sequences decode: one new token after others. A prompt of one token does not: its slot holds another's
    state."""
    packed = (i for i, (count, seen) in enumerate(zip(new, before, strict=True)) if count != 1 or seen == 0)
    return next(packed, len(new))
