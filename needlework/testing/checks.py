"""The battery: every check of every spec. An op joins the library by passing it.

A check is a function of an OpSpec that raises AssertionError with the tensor, the figure and the bound. All but the error
budget compare in float64 (`compare.EXACT`).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.testing.compare import assert_close, differentiate, leaves, like, make, outputs, poisoned, tokens, whole
from needlework.testing.errors import error_over_budget, operand, stored

ODD = (1, 37, 63, 1000)
# numbers that an error is measured on: of two equal errors one is twice the other by chance in 7 % of cases of 2 numbers, in 5e-6 of 24
ENOUGH = 24


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


def step_is_prefill(spec: OpSpec) -> None:
    """Token by token on a slot table, in place, with slots out of order, a padded row (slot −1) and a slot nobody uses."""
    B, T, slots = 2, 37, torch.tensor([2, -1, 0])
    inputs = make(spec, B, T)
    expected = outputs(whole(spec.chunk)(inputs))
    assert spec.step is not None and spec.table is not None, f"{spec.name} has no step"
    step, table = spec.step, spec.table(4)
    before = {name: x.clone() for name, x in leaves(table)}
    pad = torch.tensor([0, 0, 1])  # the padded row brings live values, which must go nowhere
    for t in range(T):
        result = step(**tokens(spec, inputs, lambda x, t=t: x[pad, t]), state=table, slots=slots)
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


def error_budget(
    spec: OpSpec,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
    B: int = 32,  # 4,096 numbers a head even for a gate
    T: int = 128,
) -> dict[str, float]:
    """Every dtype, outputs, states and gradients, all styles. Returns {dtype: worst error ÷ budget}."""
    worst = {}
    for dtype in dtypes:
        figures = []
        for style in spec.styles:
            inputs = make(spec, B, T, style=style)
            by_token = {f"d{name}" for name in spec.tokens} | _token_outputs(spec, inputs)
            found = _four_ways(spec, dtype, inputs)
            found |= _over_seeds(spec, dtype, style, {n: x[0].numel() for n, x in found.items() if x[0].numel() < ENOUGH})
            for name, results in found.items():
                fast, exact, definition, literal = results
                ratio, head = error_over_budget(fast, exact, definition, literal, 2 if name in by_token else None)
                figures.append((ratio, f"{name}, head {head}, {style} inputs"))
        ratio, where = max(figures)
        assert ratio <= 1, f"{dtype}: {where}: error is {ratio:.2f} x its budget"
        worst[str(dtype).removeprefix("torch.")] = ratio
    return worst


def _four_ways(spec: OpSpec, dtype: torch.dtype, inputs: dict) -> dict[str, tuple[Tensor, ...]]:
    """Every output, state and gradient: fast, exact, by the definition and by the literal form at `dtype`."""
    kept, wide, single = stored(inputs, dtype, spec.half)
    ways = (
        differentiate(whole(spec.chunk), kept),
        differentiate(whole(spec.recurrent), wide),
        differentiate(whole(spec.recurrent, operand=operand(dtype)), single),
        differentiate(whole(spec.literal, operand=operand(dtype)), single),
    )
    fast, exact, definition, literal = ({**values, **gradients} for values, gradients in ways)
    for name in [name for name, x in fast.items() if not x.is_floating_point()]:
        assert torch.equal(fast.pop(name), exact[name]), f"{name} differs"
    return {name: (x, exact[name], definition[name], literal[name]) for name, x in fast.items()}


def budgeted(spec: OpSpec, dtype: torch.dtype, B: int, T: int, style: str, device: torch.device) -> dict[str, float]:
    """error ÷ budget of every output, state and gradient of one case on `device`, over all heads together."""
    inputs = {name: x.to(device) for name, x in make(spec, B, T, style=style).items()}
    found = {}
    for name, (fast, exact, definition, literal) in _four_ways(spec, dtype, inputs).items():
        found[name] = error_over_budget(fast, exact, definition, literal, None)[0]
    return found


def _over_seeds(spec: OpSpec, dtype: torch.dtype, style: str, sizes: dict[str, int]) -> dict[str, tuple[Tensor, ...]]:
    """The tensors of so few numbers (parameters' gradients) again, from as many short cases as make them ENOUGH."""
    seeds = range(-(-ENOUGH // min(sizes.values())) if sizes else 0)
    cases = [_four_ways(spec, dtype, make(spec, 2, 24, seed, style)) for seed in seeds]
    return {name: tuple(torch.stack(way) for way in zip(*(case[name] for case in cases), strict=True)) for name in sizes}


def _token_outputs(spec: OpSpec, inputs: dict) -> set[str]:
    """Names of the outputs laid out [B T H ...]: all fields but the state."""
    return set(outputs(spec.chunk(**tokens(spec, inputs, lambda x: x[:1, :1]))))


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


def compiles_without_a_graph_break(spec: OpSpec) -> None:
    """torch.compile(fullgraph=True), forward and backward, plain and packed."""
    torch._dynamo.reset()
    for settings in ({}, {"cu_seqlens": torch.tensor([0, 5, 21])}):
        inputs = make(spec, 1 if settings else 2, 21)
        call = lambda inputs, settings=settings: outputs(spec.chunk(**inputs, **settings))
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        values = lambda f: differentiate(lambda x: tuple(f(x).values()), inputs)  # noqa: B023
        got, want = values(compiled), values(call)
        assert_close(got[0], want[0], "compiled")
        assert_close(got[1], want[1], "compiled")


def custom_ops_pass_opcheck(spec: OpSpec) -> None:
    """Schema, fake and autograd registration of every custom op that a call reaches."""
    for settings in ({}, {"cu_seqlens": torch.tensor([0, 5, 5, 21])}):
        with _record_custom_ops() as calls:
            inputs = {n: x.requires_grad_() for n, x in make(spec, 1 if settings else 2, 21).items()}
            result = spec.chunk(**inputs, output_final_state=True, **settings)
            total: Any = sum(x.sum() for _, x in leaves(result) if x.requires_grad)
            total.backward()
        assert calls or "no custom op" in spec.skip, f"{spec.name}: no custom op was called"
        for op, args, kwargs in calls.values():
            args = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in args)
            torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
            if not op._name.endswith("_bwd"):
                torch.library.opcheck(op, args, kwargs, test_utils=("test_autograd_registration",))


@contextlib.contextmanager
def _record_custom_ops() -> Iterator[dict]:
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "needlework":
                calls[func._name] = (func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield calls


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


def takes_slots(spec: OpSpec) -> bool:
    """Whether `chunk` takes a slot table."""
    return "state" in inspect.signature(spec.chunk).parameters


def slots_hold_states(spec: OpSpec, T: int = 83, impls: tuple[str, ...] = ("torch", "reference")) -> None:
    """`chunk` on slots of a table is `chunk` from initial states, its outputs to the bit, and nothing else of the table changes. Slots
    out of order and apart, NaN where nothing is to be read; a batch, packed sequences, no token, and a prompt in two calls."""
    if not takes_slots(spec):
        return
    for impl in impls:
        no, yes = False, True
        _on_slots(spec, impl, make(spec, 4, T), [4, 0, -1, 2], [no, yes, no, no])
        _on_slots(spec, impl, make(spec, 4, T), [4, -1, 3, 0], None)
        nothing = tokens(spec, make(spec, 4, T), lambda x: x[:, :0])
        _on_slots(spec, impl, nothing, [4, 0, -1, 2], [no, yes, yes, no])
        ends = [0, T // 4, T // 4, T // 4, T // 2 + 1, T]
        _on_slots(spec, impl, make(spec, 1, T), [4, 1, 0, -1, 2], [no, no, yes, no, no], ends)
        _on_slots(spec, impl, make(spec, 1, T), [4, 1, 0, -1, 2], [no, no, yes, no, yes], ends)
        if "split_then_resume" not in spec.skip:
            _in_two_calls(spec, impl, T)


def _on_slots(
    spec: OpSpec, impl: str, inputs: dict, slots: list[int], fresh: list[bool] | None, ends: Sequence[int] | None = None
) -> None:  # fmt: skip
    """One call on a table and one from initial states."""
    N, T = len(slots), inputs[spec.tokens[0]].shape[1]
    lengths = [T] * N if ends is None else [b - a for a, b in pairwise(ends)]
    anew = fresh or [False] * N
    settings: dict[str, Any] = {"impl": impl} | ({} if ends is None else {"cu_seqlens": torch.tensor(ends)})
    history = dict(leaves(whole(spec.chunk)(make(spec, N, 9, seed=1))[-1]))
    memory, table = poisoned_table(spec, 6)
    start = {name: torch.zeros_like(x) for name, x in history.items()}
    for name, x in leaves(table):
        for n, slot in enumerate(slots):
            if slot >= 0 and not anew[n]:
                x[slot] = start[name][n] = history[name][n]
                if not lengths[n] and x.is_floating_point():
                    x[slot].view(-1)[0] = -0.0  # which a sum with zeros would change
    before = [x.clone() for x in memory]
    initial = like(table, iter(start.values()))
    want = spec.chunk(**inputs, initial_state=initial, output_final_state=True, **settings)
    of_sequences = {"slots": torch.tensor(slots, dtype=torch.int32), "fresh": None if fresh is None else torch.tensor(fresh)}
    got = spec.chunk(**inputs, state=table, **of_sequences, **settings)
    where = f"{impl}, slots {slots}, fresh {fresh}, lengths {lengths}"
    assert got[-1] is None, f"{where}: a state was returned"
    found = outputs(got)
    for name, x in outputs(want).items():
        assert torch.equal(found[name], x), f"{where}: {name} is not that from initial states"
    # what may change: the slots of sequences with tokens, and of fresh ones
    written = [n for n in range(N) if slots[n] >= 0 and (lengths[n] or anew[n])]
    final = dict(leaves(want[-1]))
    for (name, x), old, now in zip(leaves(table), before, memory, strict=True):
        for n in written:
            assert_close({name: x[slots[n]]}, {name: final[name][n]}, f"{where}: state of sequence {n}")
            old[slots[n], 2:-2] = now[slots[n], 2:-2]
        same = torch.equal(old.view(torch.uint8), now.view(torch.uint8))
        assert same, f"{where}: state {name}: what no sequence owns has changed"


def _in_two_calls(spec: OpSpec, impl: str, T: int) -> None:
    """A prompt in two calls on its slot, fresh in the first, is the prompt in one."""
    inputs, fresh = make(spec, 2, T), torch.tensor([True, True])
    _, table = poisoned_table(spec, 3)
    cut = T // 3
    first = spec.chunk(**tokens(spec, inputs, lambda x: x[:, :cut]), state=table, fresh=fresh, impl=impl)
    rest = spec.chunk(**tokens(spec, inputs, lambda x: x[:, cut:]), state=table, impl=impl)
    *values, state = spec.chunk(**inputs, output_final_state=True, impl=impl)
    joined = [torch.cat(pair, 1) for pair in zip(first[:-1], rest[:-1], strict=True)]
    found = {n: x[:2] for n, x in leaves(table, "state")}
    assert_close(dict(leaves(tuple(joined))), dict(leaves(tuple(values))), f"{impl}, two calls on slots")
    assert_close(found, dict(leaves(state, "state")), f"{impl}, state after two calls on slots")


def poisoned_table(spec: OpSpec, slots: int) -> tuple[list[Tensor], Any]:
    """A table whose slots lie apart, all NaN (of integers a billion), and the memory that it lies in: [slots numbers] of each tensor."""
    assert spec.table is not None, f"{spec.name} has no table"
    empty = spec.table(slots)
    memory, columns = [], []
    for _, x in leaves(empty):
        size = x[0].numel()
        poison = torch.nan if x.is_floating_point() else 10**9
        memory.append(torch.full((slots, size + 4), poison, dtype=x.dtype))
        columns.append(memory[-1][:, 2 : size + 2].view(x.shape) if x.dim() > 1 else memory[-1][:, 2])
    return memory, like(empty, iter(columns))


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
