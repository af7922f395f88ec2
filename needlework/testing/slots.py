"""The battery's check of slot tables: a call on one is a call from initial states, and nothing else of the table changes."""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.testing.compare import assert_close, leaves, like, make, outputs, tokens, whole


def takes_slots(spec: OpSpec) -> bool:
    """Whether `chunk` takes a slot table."""
    return "state" in inspect.signature(spec.chunk).parameters


def slots_hold_states(spec: OpSpec, T: int = 83, impls: tuple[str, ...] = ("torch", "reference")) -> None:
    """`chunk` on slots of a table is `chunk` from initial states, its outputs to the bit, and nothing else of the table changes. Slots
    out of order and apart, NaN where nothing may be read; a batch, packed sequences, no token, and a prompt in two calls."""
    if not takes_slots(spec):
        return
    for impl in impls:
        no, yes = False, True
        on_slots(spec, impl, make(spec, 4, T), [4, 0, -1, 2], [no, yes, no, no])
        on_slots(spec, impl, make(spec, 4, T), [4, -1, 3, 0], None)
        nothing = tokens(spec, make(spec, 4, T), lambda x: x[:, :0])
        on_slots(spec, impl, nothing, [4, 0, -1, 2], [no, yes, yes, no])
        ends = [0, T // 4, T // 4, T // 4, T // 2 + 1, T]
        on_slots(spec, impl, make(spec, 1, T), [4, 1, 0, -1, 2], [no, no, yes, no, no], ends)
        on_slots(spec, impl, make(spec, 1, T), [4, 1, 0, -1, 2], [no, no, yes, no, yes], ends)
        if "split_then_resume" not in spec.skip:
            _in_two_calls(spec, impl, T)


def on_slots(
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
