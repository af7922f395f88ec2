"""A write rule: gates of its input, a fixed state [N HV K V], an op from q, k, v and the gates to o and the state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from needlework.layers.batch import Batch
from needlework.layers.config import Config, Width
from needlework.layers.features import FeatureConfig
from needlework.layers.gates import GateConfig
from needlework.layers.norm import Later, now, wide
from needlework.layers.projection import Map, Projection, side_by_side
from needlework.layers.state import Part, fixed


@dataclass(frozen=True, kw_only=True)
class WriteConfig(Config):
    """Base of the write rules' configs. unit_keys: q and k come L2-normalised; write_rank: rows written a token; features: the map that
    q and k pass; normalise: what is read is divided by the sum of its weights."""

    unit_keys: ClassVar[bool] = True
    if TYPE_CHECKING:  # a field in some rules, and a frozen one is read-only

        @property
        def write_rank(self) -> int: ...

        @property
        def gate(self) -> GateConfig | None: ...

        @property
        def features(self) -> FeatureConfig | None: ...

        @property
        def normalise(self) -> bool: ...

    else:
        write_rank, gate, features, normalise = 1, None, None, False

    def build(self, width: Width) -> "WriteRule":
        raise NotImplementedError


Rule = TypeVar("Rule", bound=WriteConfig, covariant=True)


class WriteRule(nn.Module, Generic[Rule]):
    """Base of the rules: `forward(op, q, k, v, q_read=, **gates) -> (o [B T HV V], state)`.

    A rule names its ops, `chunk` and `step`, and says in `call` how either is called. q, k, v are projected, convolved and (if the config
    says `unit_keys`) normalised; q_read is what reads the state, q unless a read rule cleaned it; the gates are those of the layer's
    input x [B T D], write strengths among them. The op that a rule is given has its states and where sequences end already: who calls
    the rule holds them, as `functools.partial(rule.chunk, initial_state=…)`.
    """

    cut = 1  # of `Held`
    norms = False  # whether the ops make q and k of unit norm themselves, asked by `l2norm`
    chunk: Callable[..., Any]
    step: Callable[..., Any]
    call: Callable[..., Any]  # (op, q, k, v, *, q_read, **gates), op one of the two

    def __init__(self, config: Rule, width: Width):
        super().__init__()
        self.config, self.width = config, width
        self.gate = None if config.gate is None else config.gate.build(width)
        self.key_dim = width.key_dim  # of what writes and reads the state

    def mapped(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k as they write and read, `key_dim` channels: before a read rule sees them."""
        return q, k

    def forward(self, op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **gates: Any) -> Any:
        return self.call(op, q, k, v, **gates)

    def serve(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Mapping[str, Tensor], batch: Batch, *, l2norm: bool = False, **gates: Tensor | None
    ) -> Tensor:  # fmt: skip
        """o [T HV V] of tokens q, k, v and gates [T …]; the tables of `held` advance in place. l2norm: q and k are as they were projected,
        and q_read is None; of rules that have `norms`."""
        given: dict[str, Any] = {"state": self.state(tables)} | ({"l2norm": True} if l2norm else {})

        def step(slots: Tensor, **rows: Any) -> Any:
            return self.call(partial(self.step, **given, slots=slots), **rows)

        def chunk(slots: Tensor, fresh: Tensor, cu_seqlens: Tensor, **rows: Any) -> Any:
            return self.call(partial(self.chunk, **given, slots=slots, fresh=fresh, cu_seqlens=cu_seqlens), **rows)[0]

        return batch.on_slots(step, chunk, q=q, k=k, v=v, **gates)

    def gates(self, x: Tensor | Later, *beside: Map) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        """x [B T D] -> the gates by `forward`'s names, and what each of `beside`, other maps of x, gives (`gates_of`).

        g is the log decay [B T HV] or [B T HV K], None where nothing decays before its write.
        """
        return gates_of(x, *beside, g=self.gate)

    def held(self, dtype: torch.dtype) -> dict[str, Part]:
        """The tensors of one sequence's state, the model in `dtype`."""
        return {"S": Part((self.width.value_heads, self.width.key_dim, self.width.value_dim), fixed(dtype))}

    def state(self, tables: Mapping[str, Tensor]) -> Any:
        """The op's state of tables with the names of `held`."""
        return tables["S"]


def gates_of(x: Tensor | Later, *beside: Map, **parts: nn.Module | None) -> tuple[dict[str, Tensor | None], list[Tensor]]:
    """part(x) of each, x [B T D], by name, None for None; and what each of `beside`, maps of x too, gives.

    A part with a `project` gives `of(project(x))`. These maps are narrow, one column a head or a channel: they and `beside` are one
    product.
    """
    shared: dict[str, Any] = {name: part for name, part in parts.items() if hasattr(part, "project")}
    found = {name: None if part is None else part(now(x)) for name, part in parts.items() if name not in shared}
    made = side_by_side(x, *beside, *(part.project for part in shared.values()))
    logits = made[len(beside) :]
    found |= {name: part.of(logit) for (name, part), logit in zip(shared.items(), logits, strict=True)}
    return found, made[: len(beside)]


class Factor(nn.Module):
    """A number a head in [0, 1] that is learned: a rule that starts with a factor of 0 starts as the rule without it, and leaves it.

    Outside of [0, 1] the parameter counts as the nearest end, and its gradient passes all the same, so that it comes back.
    """

    def __init__(self, start: float, heads: int):
        super().__init__()
        self.start = start
        self.value = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.value, self.start)

    def forward(self, x: Tensor) -> Tensor:
        """x [.. heads] times the factor."""
        value = wide(self.value)
        return x * (value + (value.clamp(0, 1) - value).detach())


class Strength(nn.Module):
    """most · σ(W x + offset), one number a token and head, in float32: the write strength β, Q-Delta's λ. factor: of `Factor`, or none."""

    def __init__(self, width: Width, offset: float = 0.0, most: float = 1.0, factor: float | None = None):
        super().__init__()
        self.offset, self.most = offset, most
        self.project = Projection(width.dim, width.value_heads, bias=width.bias)
        self.factor = None if factor is None else Factor(factor, width.value_heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.project(x))

    def of(self, logit: Tensor) -> Tensor:
        strength = self.most * torch.sigmoid(wide(logit) + self.offset)
        return strength if self.factor is None else self.factor(strength)
