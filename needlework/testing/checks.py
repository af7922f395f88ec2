"""The battery: every check of every spec. An op joins the library by passing it.

A check is a function of an OpSpec that raises AssertionError with the tensor, the figure and the bound. All but the error
budget compare in float64 (`compare.EXACT`). The budget is in `budget.py`, torch.library's and the compiler's part in `operators.py`,
slot tables are in `slots.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.ops.api import OpSpec
from needlework.testing.budget import error_budget
from needlework.testing.compare import assert_close, differentiate, leaves, like, make, outputs, poisoned, tokens, whole
from needlework.testing.operators import compiles_without_a_graph_break, custom_ops_pass_opcheck
from needlework.testing.slots import slots_hold_states

ODD = (1, 37, 63, 1000)


def chunk_is_the_recurrence(spec: OpSpec) -> None:
    for style in spec.styles:
        inputs = make(spec, 2, 83, style=style)
        assert_close(
            dict(leaves(whole(spec.chunk)(inputs))),
            dict(leaves(whole(spec.recurrent)(inputs))),
            f"chunk, {style} inputs",
        )


def literal_form_is_the_recurrence(spec: OpSpec) -> None:
    inputs = make(spec, 2, 83)
    assert_close(dict(leaves(whole(spec.literal)(inputs))), dict(leaves(whole(spec.recurrent)(inputs))), "literal form")


def chunk_size_is_invisible(spec: OpSpec) -> None:
    inputs = make(spec, 2, 83)
    base = dict(leaves(whole(spec.chunk)(inputs)))
    for size in spec.chunk_sizes:
        assert_close(dict(leaves(whole(spec.chunk, chunk_size=size)(inputs))), base, f"chunk_size {size}")


def split_then_resume(spec: OpSpec, T: int = 83, cuts: tuple[int, ...] = (1, 23, 64, 82)) -> None:
    """Values and gradients through the carried state, cut at the start, inside and at the end of a chunk."""
    inputs = make(spec, 2, T)
    base = differentiate(whole(spec.chunk), inputs)
    for cut in cuts:

        def pieces(inputs: dict, cut: int = cut) -> tuple:
            first = spec.chunk(**tokens(spec, inputs, lambda x: x[:, :cut]), output_final_state=True)
            rest = tokens(spec, inputs, lambda x: x[:, cut:])
            second = spec.chunk(**rest, initial_state=first[-1], output_final_state=True)
            joined = [torch.cat(pair, 1) for pair in zip(first[:-1], second[:-1], strict=True)]
            kind: Any = type(second)
            return kind(*joined, second[-1])

        values, gradients = differentiate(pieces, inputs)
        assert_close(values, base[0], f"cut at {cut}")
        assert_close(gradients, base[1], f"cut at {cut}")


class Filled(TorchDispatchMode):
    """`most`: how many numbers the largest tensor has that is made of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.removeprefix("new_").removesuffix("_like") in ("zeros", "ones", "full"):
            self.most = max(self.most, result.numel())
        return result


def step_is_prefill(spec: OpSpec) -> None:
    """Token by token on a slot table, in place, with slots out of order, a padded row (slot −1) and an unused slot. The states are
    the table's: zeros for as many would cost a step a third more."""
    B, T, slots = 2, 37, torch.tensor([2, -1, 0])
    inputs = make(spec, B, T)
    expected = outputs(whole(spec.chunk)(inputs))
    assert spec.step is not None and spec.table is not None, f"{spec.name} has no step"
    step, table = spec.step, spec.table(4)
    before = {name: x.clone() for name, x in leaves(table)}
    states = max(len(slots) * x[0].numel() for x in before.values())
    pad = torch.tensor([0, 0, 1])  # the padded row brings live values, which must go nowhere
    for t in range(T):
        with Filled() as filled:
            result = step(**tokens(spec, inputs, lambda x, t=t: x[pad, t]), state=table, slots=slots)
        assert filled.most < states, f"{filled.most:,} equal numbers were made, where states have {states:,}"
        result = dict(leaves(result if isinstance(result, tuple) else (result,)))
        for (name, want), got in zip(expected.items(), result.values(), strict=True):
            assert_close({name: got[[0, 2]]}, {name: want[:, t]}, f"token {t}")
            assert not got[1].any(), f"token {t}: {name} of a padded row is not zero"
    for name, x in leaves(table):
        assert torch.equal(x[[1, 3]], before[name][[1, 3]]), f"{name}: a slot that no row owns has changed"


def causal(spec: OpSpec, T: int = 83) -> None:
    """What comes after a token changes nothing up to it: row t of one batch has another future after its token t, for every t."""
    past = torch.ones(T, T, dtype=torch.bool).tril()  # [row token]
    splice = lambda before, after: torch.where(past.view(T, T, *[1] * (before.dim() - 2)), before, after)
    for style in spec.styles:
        inputs, other = make(spec, 1, T, style=style), make(spec, 1, T, seed=1, style=style)
        mixed = {n: splice(x, other[n]) if n in spec.tokens else x for n, x in inputs.items()}
        base, changed = outputs(whole(spec.chunk)(inputs)), outputs(whole(spec.chunk)(mixed))
        base = {n: x.expand_as(changed[n]) for n, x in base.items()}
        assert_close({n: splice(x, base[n]) for n, x in changed.items()}, base, f"another future, {style} inputs")
        assert any(not torch.equal(changed[n], base[n]) for n in base), "the op ignores its inputs"


def gradients(spec: OpSpec) -> None:
    """Every input's gradient, final state's cotangents included, against autograd of the definition."""
    for style in spec.styles:
        inputs = make(spec, 2, 45, style=style)
        _, fast = differentiate(whole(spec.chunk, chunk_size=spec.chunk_sizes[0]), inputs)
        _, exact = differentiate(whole(spec.recurrent), inputs)
        assert_close(fast, exact, f"gradient, {style} inputs")


def limits(spec: OpSpec) -> None:
    for limit in spec.limits:
        inputs = make(spec, 2, 83)
        left, right = dict(leaves(limit.left(**inputs))), dict(leaves(limit.right(**inputs)))
        if limit.exact:
            for (name, a), b in zip(left.items(), right.values(), strict=True):
                assert torch.equal(a, b), f"{limit.name}: {name} is not bit-equal"
        else:
            assert_close(left, dict(zip(left, right.values(), strict=True)), limit.name)


def packed_is_separate(spec: OpSpec) -> None:
    """Three sequences and an empty one in one row, values, states and gradients, against one call each."""
    ends = torch.tensor([0, 19, 19, 83, 120])
    inputs = make(spec, 1, 120)

    def packed(inputs: dict) -> tuple:
        return spec.chunk(**inputs, cu_seqlens=ends, output_final_state=True)

    def separate(inputs: dict) -> tuple:
        parts = [
            spec.chunk(**tokens(spec, inputs, lambda x, a=a, b=b: x[:, a:b]), output_final_state=True)
            for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
        joined = [torch.cat(field, 1) for field in zip(*(p[:-1] for p in parts), strict=True)]
        kind: Any = type(parts[0])
        return kind(*joined, _stack([p[-1] for p in parts]))

    got, want = differentiate(packed, inputs), differentiate(separate, inputs)
    assert_close(got[0], want[0], "packed")
    assert_close(got[1], want[1], "packed")


def _stack(states: list) -> object:
    """One state of N rows from N states of one row; pages get as many rows as the longest."""
    columns = [[x for _, x in leaves(state)] for state in states]

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        longest = [max(p.shape[i] for p in parts) for i in range(1, parts[0].dim())]
        grown = []
        for part in parts:
            pad = [n for i in reversed(range(1, part.dim())) for n in (0, longest[i - 1] - part.shape[i])]
            grown.append(torch.nn.functional.pad(part, pad) if any(pad) else part)
        return torch.cat(grown)

    return like(states[0], iter([join(parts) for parts in zip(*columns, strict=True)]))


def batch_invariant(spec: OpSpec) -> None:
    """A row's result does not depend on who shares its batch."""
    inputs = make(spec, 3, 83)
    together = dict(leaves(whole(spec.chunk)(inputs)))
    alone = dict(leaves(whole(spec.chunk)(tokens(spec, inputs, lambda x: x[1:2]))))
    assert_close({n: x[1:2] for n, x in together.items()}, alone, "row 1 of 3")


def outputs_are_complete_when_memory_is_poisoned(spec: OpSpec) -> None:
    """Every number of every output is written: torch.empty gives NaN here."""
    for T in (1, 37, 64):
        with poisoned():
            found = differentiate(whole(spec.chunk), make(spec, 2, T))
        for name, x in (item for part in found for item in part.items()):
            assert torch.isfinite(x).all(), f"T = {T}: {name} holds what was never written"


def odd_lengths(spec: OpSpec, lengths: tuple[int, ...] = ODD) -> None:
    for T in lengths:
        inputs = make(spec, 1, T)
        assert_close(dict(leaves(whole(spec.chunk)(inputs))), dict(leaves(whole(spec.recurrent)(inputs))), f"T = {T}")


def no_tokens(spec: OpSpec) -> None:
    """T = 0 returns empty outputs and the initial state."""
    inputs = make(spec, 2, 21)
    state = whole(spec.chunk)(inputs)[-1]
    nothing = tokens(spec, inputs, lambda x: x[:, :0])
    result = spec.chunk(**nothing, initial_state=state, output_final_state=True)
    assert all(x.shape[1] == 0 for x in outputs(result).values())
    assert_close(dict(leaves(result[-1])), dict(leaves(state)), "state after no token")
    fresh = spec.chunk(**nothing, output_final_state=True)
    assert all(not x.any() for _, x in leaves(fresh[-1]))


CHECKS: tuple[Callable[[OpSpec], object], ...] = (
    chunk_is_the_recurrence,
    literal_form_is_the_recurrence,
    chunk_size_is_invisible,
    split_then_resume,
    step_is_prefill,
    causal,
    gradients,
    limits,
    error_budget,
    packed_is_separate,
    batch_invariant,
    compiles_without_a_graph_break,
    custom_ops_pass_opcheck,
    outputs_are_complete_when_memory_is_poisoned,
    odd_lengths,
    no_tokens,
    slots_hold_states,
)
