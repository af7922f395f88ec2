"""One token for many sequences, in place: what share of the copy bandwidth it reaches, replayed from a CUDA graph.

Tokens are bfloat16, states float32; only the matrix state's bytes are counted, read and written once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from cases import carve_inputs, inputs, spec_of
from timing import median, replay
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.ops.carve.state import empty_state as empty_carve
from needlework.ops.ccq.state import empty_state as empty_ccq
from needlework.testing.compare import leaves, tokens, whole
from needlework.testing.errors import error_over_budget

SHAPE = {"B": 512, "T": 1, "H": 8, "K": 128, "V": 128}
BAR = 0.85


@dataclass(frozen=True)
class Step:
    op: str
    spec: OpSpec
    inputs: Callable[..., dict[str, Tensor]]
    table: Callable[..., object]

    @property
    def key(self) -> str:
        return f"step/{self.op}"

    def tensors(
        self, device: torch.device | str, half: torch.dtype, B: int, T: int, H: int, K: int, V: int
    ) -> dict[str, Tensor]:
        made = self.inputs(torch.Generator(device=device).manual_seed(0), B, T, H, K, V)
        return {name: x.to(half if name in self.spec.half else torch.float32) for name, x in made.items()}

    def at(self, x: dict[str, Tensor], t: int) -> dict[str, Tensor]:
        return tokens(self.spec, x, lambda y: y[:, t].contiguous())

    def judge(self, device: torch.device | str, B: int = 2, T: int = 20, H: int = 2, K: int = 128, V: int = 128) -> float:
        """The outputs' and states' largest error ÷ budget after T tokens, all in float32."""
        x, table = self.tensors(device, torch.float32, B, T, H, K, V), self.table(B, H, K, V, device=device)
        rows = [self.spec.step(**self.at(x, t), state=table) for t in range(T)]
        fast = [torch.stack([next(leaves(row))[1] for row in rows], 1), *(y for _, y in leaves(table))]
        forms = ((self.spec.recurrent, torch.float64), (self.spec.recurrent, torch.float32), (self.spec.literal, torch.float32))
        truth = [[y for _, y in leaves(whole(form)({n: y.to(kind) for n, y in x.items()}))] for form, kind in forms]
        ways = [way for way in zip(fast, *truth, strict=True) if way[0].is_floating_point()]
        return max(error_over_budget(*way, None)[0] for way in ways)

    def time(self, device: torch.device | str) -> tuple[float, int]:
        """Milliseconds a token, and the bytes that had to move."""
        B, _, H, K, V = SHAPE.values()
        x, table = self.at(self.tensors(device, torch.bfloat16, B, 1, H, K, V), 0), self.table(B, H, K, V, device=device)
        slots = torch.randperm(B, device=device)
        matrix = max((y for _, y in leaves(table)), key=Tensor.numel)
        return median(replay(partial(self.spec.step, **x, state=table, slots=slots))), 2 * matrix.nbytes


def _matrix(B: int, H: int, K: int, V: int, device: torch.device | str) -> Tensor:
    return torch.zeros(B, H, K, V, device=device)


def _curvature(B: int, H: int, K: int, V: int, device: torch.device | str) -> tuple:
    return empty_ccq(B, H, K, device=device)


def steps() -> Iterator[Step]:
    yield Step("gated", spec_of("delta/gated"), partial(inputs, extra=("beta",)), _matrix)
    yield Step("qdelta", spec_of("qdelta"), partial(inputs, extra=("beta", "lam")), _matrix)
    yield Step("kda", spec_of("delta/kda"), partial(inputs, gate="channel", extra=("beta",)), _matrix)
    yield Step("carve", spec_of("carve"), carve_inputs, empty_carve)
    yield Step("ccq", spec_of("ccq"), partial(inputs, gate=None, extra=("eta",), values=False), _curvature)
