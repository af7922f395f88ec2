"""What a layout says of a source: its config as ours, and for each of our tensors the names of theirs."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from needlework.models.config import NeedleworkConfig

Names = dict[str, tuple[str, ...]]  # ours -> theirs, one behind the other along the first axis


class Reading(NamedTuple):
    """config: ours. names: every tensor of that model, but a tied unembedding. dead: tensors of the source that no logit depends on.

    cut: tensors of the source that hold several of ours one below the other: the parts and the rows of each, in their order. `names`
    has part p of tensor t as "t[p]".
    """

    config: NeedleworkConfig
    names: Names
    dead: frozenset[str] = frozenset()
    cut: Mapping[str, Mapping[str, int]] = MappingProxyType({})

    def parts(self, weights: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
        """The source's tensors under the names that `names` has. ValueError for a tensor with other rows than its parts have."""
        found = {name: x for name, x in weights.items() if name not in self.dead}
        for name, rows in self.cut.items():
            if name not in found:
                continue  # its parts are missing then
            whole, total = found.pop(name), sum(rows.values())
            if whole.shape[:1] != (total,):
                each = ", ".join(f"{n} of {part}" for part, n in rows.items())
                raise ValueError(f"{where}: {name} has the shape {[*whole.shape]}, expected {total} rows of its config: {each}")
            cut = zip(rows, whole.split([*rows.values()]), strict=True)
            found |= {f"{name}[{part}]": x.clone() for part, x in cut}  # safetensors writes no two views of one tensor
        return found


def in_layers(layers: Iterable[int], ours: str, theirs: str, names: Mapping[str, str | tuple[str, ...]]) -> Names:
    """The names in each of `layers`: ours and theirs are what precedes them, with {} for the layer's number."""
    each = {mine: (name,) if isinstance(name, str) else name for mine, name in names.items()}
    return {
        f"{ours.format(n)}{mine}": tuple(f"{theirs.format(n)}{name}" for name in several)
        for n in layers
        for mine, several in each.items()
    }
