"""Sequences on a table of states in plain torch: what is read from it, what is written to it, and what a call on one refuses."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from needlework.ops.slots.table import Sequences, check_table


class Pair(NamedTuple):
    S: Tensor
    position: Tensor


def table():
    """Five slots, each 3 numbers and a count; slots lie apart, and what lies between them is NaN."""
    memory = torch.full((5, 8), torch.nan, dtype=torch.float64)
    S = memory[:, 1:4]
    S.copy_(torch.arange(15.0).view(5, 3) + 1)
    return memory, Pair(S, torch.arange(5) + 10)


def sequences(slots, fresh=None, T=4, cu_seqlens=None):
    as_tensor = lambda x, dtype=None: None if x is None else torch.tensor(x, dtype=dtype)
    N = len(slots) if slots is not None else 2
    return Sequences.of(as_tensor(slots), as_tensor(fresh, torch.bool), N, T, as_tensor(cu_seqlens), torch.device("cpu"))


def test_sequences_start_from_their_slots_and_from_zeros_where_they_are_fresh_or_have_none():
    memory, pair = table()
    memory[3] = torch.nan
    S, position = sequences([2, -1, 3, 0], [False, False, True, False]).read(pair)
    assert S.tolist() == [[7, 8, 9], [0, 0, 0], [0, 0, 0], [1, 2, 3]]
    assert position.tolist() == [12, 0, 0, 10]
    assert torch.equal(sequences(None).read(pair.S), pair.S[:2])


@pytest.mark.parametrize("slots", [[4, -1, 1], [-1, 4, 1], [-1, -1, -1], [0, 1, 2]])
def test_states_go_to_their_slots_alone(slots):
    memory, pair = table()
    before, counts = memory.clone(), pair.position.clone()
    new = Pair(100 + torch.rand(3, 3, dtype=torch.float64), torch.tensor([100, 101, 102]))
    sequences(slots).write(pair, new)
    for n, slot in enumerate(slots):
        if slot >= 0:
            before[slot, 1:4], counts[slot] = new.S[n], new.position[n]
    assert torch.equal(memory.view(torch.int64), before.view(torch.int64)) and torch.equal(pair.position, counts)


def test_an_empty_sequence_leaves_its_slot_unless_it_is_fresh():
    for cu_seqlens, T in (([0, 0, 4, 4], 4), (None, 0)):
        found = sequences([3, 1, 2], [False, False, True], T, cu_seqlens)
        assert found.slots.tolist() == [-1, 1 if T else -1, 2]
        assert found.resumed.tolist() == [False, bool(T), False]


def test_no_sequence_writes_nothing():
    memory, pair = table()
    before = memory.clone()
    Sequences.of(None, None, 0, 4, None, torch.device("cpu")).write(pair, Pair(pair.S[:0], pair.position[:0]))
    assert torch.equal(memory.view(torch.int64), before.view(torch.int64))


def call(state=None, slots=None, fresh=None, initial_state=None, output_final_state=False, inputs=(), dtype=torch.float64):
    check_table(
        state, slots, fresh, 2,
        dtype=dtype, initial_state=initial_state, output_final_state=output_final_state, inputs=inputs,
    )  # fmt: skip


REFUSED = {
    "slots": {"slots": torch.tensor([0, 1])},
    "fresh": {"fresh": torch.tensor([True, False])},
    "initial_state": {"state": torch.zeros(4, 3, dtype=torch.float64), "initial_state": torch.zeros(2, 3)},
    "output_final_state": {"state": torch.zeros(4, 3, dtype=torch.float64), "output_final_state": True},
    "slots: axis 0": {"state": torch.zeros(4, 3, dtype=torch.float64), "slots": torch.tensor([0])},
    "slots: expected": {"state": torch.zeros(4, 3, dtype=torch.float64), "slots": torch.tensor([0.0, 1.0])},
    "fresh: axis 0": {"state": torch.zeros(4, 3, dtype=torch.float64), "fresh": torch.tensor([True])},
    "fresh: expected bool": {"state": torch.zeros(4, 3, dtype=torch.float64), "fresh": torch.tensor([1, 0])},
    "state: expected a tensor": {"state": [0.0]},
    "state: expected at least 2 slots": {"state": torch.zeros(1, 3, dtype=torch.float64)},
    "state: expected at least 1 slots": {"state": torch.zeros(0, 3, dtype=torch.float64), "slots": torch.tensor([-1, -1])},
    "state: a slot must be contiguous": {"state": torch.zeros(4, 3, 2, dtype=torch.float64).mT},
    "state: expected torch.float64": {"state": torch.zeros(4, 3)},
    "state.S: a slot must be contiguous": {"state": Pair(torch.zeros(4, 3, 2, dtype=torch.float64).mT, torch.zeros(4))},
    "state: no gradient": {
        "state": torch.zeros(4, 3, dtype=torch.float64),
        "inputs": (None, torch.zeros(2, requires_grad=True)),
    },
}


@pytest.mark.parametrize(("message", "arguments"), REFUSED.items(), ids=REFUSED)
def test_what_a_call_on_a_table_refuses(message, arguments):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(**arguments)


def test_what_a_call_on_a_table_accepts():
    call()
    call(table()[1], torch.tensor([-1, 4], dtype=torch.int32), torch.tensor([True, False]))
    with torch.no_grad():
        call(table()[1].S, inputs=(torch.zeros(2, requires_grad=True),))
