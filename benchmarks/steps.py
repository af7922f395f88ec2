"""One token for many sequences: what share of the copy bandwidth it reaches, replayed from a CUDA graph.

In place: tokens are bfloat16, states float32; only the matrix state's bytes are counted, read and written once. Attention over pages: all
bfloat16, keys and values are read once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from attention_cases import polar_inputs
from cases import carve_inputs, inputs, mamba3_inputs, spec_of
from timing import median, replay
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.ops.carve.state import empty_state as empty_carve
from needlework.ops.ccq.state import empty_state as empty_ccq
from needlework.ops.mamba3 import empty_state as empty_mamba3
from needlework.ops.paged import paged_attention, paged_differential, paged_polar
from needlework.testing.compare import leaves, tokens, whole
from needlework.testing.errors import error_over_budget, operand

SHAPE = {"B": 512, "T": 1, "H": 8, "K": 128, "V": 128}
BAR = 0.85


@dataclass(frozen=True)
class Step:
    op: str
    spec: OpSpec
    inputs: Callable[..., dict[str, Tensor]]
    table: Callable[..., object]
    kind = "step"
    dtype = "float32"  # of the state
    bar = BAR

    @property
    def key(self) -> str:
        return f"step/{self.op}"

    @property
    def shape(self) -> dict[str, int]:
        return SHAPE

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


def _turned(B: int, H: int, K: int, V: int, device: torch.device | str) -> tuple:
    return empty_mamba3(B, H, K, V, max(K // 4, 1), device=device)


PAGE = 16
# row -> the read-out over pages, and the spec that it is judged by
READ_OUTS: dict[str, tuple[Callable[..., object], OpSpec]] = {
    "polar/decode": (paged_polar, spec_of("paged/polar")),
    "paged/softmax": (paged_attention, spec_of("paged/softmax")),
    "paged/differential": (paged_differential, spec_of("paged/differential")),
}


@dataclass(frozen=True)
class Decode:
    """The newest token of B sequences of T tokens, q8 kv2 d128, on shuffled pages."""

    op: str
    B: int
    T: int
    bar: float
    kind = "share"
    dtype = "bfloat16"

    @property
    def key(self) -> str:
        return f"{self.op}/B{self.B}-{self.T // 1024}K"

    @property
    def shape(self) -> dict[str, int]:
        return {"B": self.B, "T": self.T, "H": 2, "K": 128, "V": 128}

    def inputs(self, generator: torch.Generator, B: int, T: int, K: int, V: int) -> dict[str, Tensor]:
        x = polar_inputs(generator, B, T, 2, K, V) | {"lam": torch.full((8,), 0.5, device=generator.device)}
        names = READ_OUTS[self.op][1].inputs(torch.Generator(), 1, 1, "random")
        return {name: x[name] for name in names}

    def judge(
        self, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, T: int = 200, K: int = 128, V: int = 128
    ) -> float:  # fmt: skip
        """The outputs' largest error ÷ budget, of decode and prefill on pages."""
        spec = READ_OUTS[self.op][1]
        x = self.inputs(torch.Generator(device=device).manual_seed(0), 2, T, K, V)
        x = {name: y.to(dtype if name in spec.half else torch.float32) for name, y in x.items()}
        wide, single = ({name: y.to(kind) for name, y in x.items()} for kind in (torch.float64, torch.float32))
        half = operand(dtype)
        found = (
            spec.chunk(**x, impl="triton"), spec.recurrent(**wide), spec.recurrent(**single, operand=half),
            spec.literal(**single, operand=half),
        )  # fmt: skip
        return max(error_over_budget(*(y for _, y in way), None)[0] for way in zip(*map(leaves, found), strict=True))

    def time(self, device: torch.device | str) -> tuple[float, int]:
        generator = torch.Generator(device=device).manual_seed(0)
        attend, spec = READ_OUTS[self.op]
        x = self.inputs(generator, self.B, 1, 128, 128)
        parameters = {name: y.float() for name, y in x.items() if name not in spec.half}
        count = self.T // PAGE
        k, v = (
            torch.randn(self.B * count, PAGE, 2, 128, generator=generator, device=device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        table = torch.randperm(self.B * count, generator=generator, device=device).view(self.B, count).int()
        where = {"block_table": table, "length": torch.full((self.B,), self.T, dtype=torch.int32, device=device)}
        q = x["q"][:, 0].bfloat16().contiguous()
        call = partial(attend, q, k, v, **parameters, **where, impl="triton")
        return median(replay(call)), k.nbytes + v.nbytes


def steps() -> Iterator[Step | Decode]:
    for B, T, bar in ((8, 65536, 0.85), (64, 8192, 0.85), (1, 65536, 0.4)):
        yield Decode("polar/decode", B, T, bar)
    for op in ("paged/softmax", "paged/differential"):
        yield Decode(op, 64, 8192, 0.85)
    yield Step("gated", spec_of("delta/gated"), partial(inputs, extra=("beta",)), _matrix)
    yield Step("qdelta", spec_of("qdelta"), partial(inputs, extra=("beta", "lam")), _matrix)
    yield Step("kda", spec_of("delta/kda"), partial(inputs, gate="channel", extra=("beta",)), _matrix)
    yield Step("carve", spec_of("carve"), carve_inputs, empty_carve)
    yield Step("ccq", spec_of("ccq"), partial(inputs, gate=None, extra=("eta",), values=False), _curvature)
    yield Step("mamba3", spec_of("mamba3"), mamba3_inputs, _turned)
