"""What a layout says of a source: its config as ours, and for each of our tensors the names of theirs."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from needlework.models.config import NeedleworkConfig

Names = dict[str, tuple[str, ...]]  # ours -> theirs, one behind the other along the first axis


class Reading(NamedTuple):
    """config: ours. names: every tensor of that model, but a tied unembedding. dead: tensors of the source that no logit depends on."""

    config: NeedleworkConfig
    names: Names
    dead: frozenset[str] = frozenset()


def in_layers(layers: Iterable[int], ours: str, theirs: str, names: Mapping[str, str | tuple[str, ...]]) -> Names:
    """The names in each of `layers`: ours and theirs are what stands before them, with {} for the layer's number."""
    each = {mine: (name,) if isinstance(name, str) else name for mine, name in names.items()}
    return {
        f"{ours.format(n)}{mine}": tuple(f"{theirs.format(n)}{name}" for name in several)
        for n in layers
        for mine, several in each.items()
    }
