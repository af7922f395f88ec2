"""Chunk kernels on a slot table, in Triton's interpreter: states start from slots and end there, in place."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import normalize

from needlework.ops.delta import chunk_delta
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.runtime.launch_configs import forced
from needlework.ops.specs import specs
from needlework.testing import slots as slot_checks
from needlework.testing.compare import make
from needlework.testing.rows import chosen

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

SPECS = {spec.name: spec for spec in specs()}
RULES = ("qdelta", "delta/gla", "delta/gated", "delta/kda", "delta/gdn2", "delta/previous")
T = 19  # two chunks, the second of three tokens


def holds(rule, T=T):
    slot_checks.slots_hold_states(SPECS[rule], T=T, impls=("triton",))


def in_segments(length, monkeypatch):
    from needlework.ops.delta.channel import op as channel_op
    from needlework.ops.delta.scalar import op as scalar_op

    for module in (channel_op, scalar_op):
        monkeypatch.setattr(module, "_segment_length", lambda inputs, *_: length if inputs.v.numel() else 0)


@pytest.mark.parametrize("rule", chosen(RULES, quick=("qdelta", "delta/gla")))
def test_slots_hold_states(rule):
    holds(rule)


@pytest.mark.parametrize("rule, K", [("delta/gated", 136), ("delta/gated", 200), ("delta/previous", 136)])
def test_slots_hold_states_of_several_tiles_of_keys(rule, K):
    spec = SPECS[rule]

    def inputs(generator, *sizes):
        x = spec.inputs(generator, *sizes)
        wide = lambda y: normalize(torch.randn(*y.shape[:-1], K, generator=generator, dtype=y.dtype), dim=-1)
        gates = {"g": x["g"].repeat(1, 1, 1, K)[..., :K]} if x["g"].dim() == 4 else {}
        return x | {name: wide(x[name]) for name in "qk"} | gates

    def table(slots):
        _, H, _, V = spec.table(slots).shape
        return torch.zeros(slots, H, K, V, dtype=torch.float64)

    slot_checks.slots_hold_states(replace(spec, inputs=inputs, table=table), T=T, impls=("triton",))


@pytest.mark.parametrize("NP", chosen((2, 5), quick=(5,)))
def test_chains_that_are_cut_hand_on_what_the_slots_held(NP):
    with forced("delta/scalar", scan={"NP": NP}):
        holds("delta/gated")


@pytest.mark.parametrize(
    "rule, length",
    chosen((("qdelta", 2), ("qdelta", 1), ("delta/gdn2", 1)), quick=(("qdelta", 1), ("delta/gdn2", 1))),
)
def test_the_last_segment_leaves_the_state(rule, length, monkeypatch):
    """Of packed sequences some have a segment, some two."""
    in_segments(length, monkeypatch)
    holds(rule, 2 * T)


@pytest.mark.parametrize("rule", ("qdelta", "delta/gdn2"))
def test_a_sequence_of_one_segment_leaves_what_its_walk_left(rule, monkeypatch):
    """To the bit what a call from initial states returns, which takes the last segment's state."""
    in_segments(1, monkeypatch)
    spec, ends = SPECS[rule], torch.tensor([0, 40, 40, 41, 61])
    x = {n: y.float() for n, y in make(spec, 1, 61).items()}
    state = torch.randn(4, *spec.table(1).shape[1:], generator=torch.Generator().manual_seed(0))
    want = spec.chunk(**x, initial_state=state, output_final_state=True, cu_seqlens=ends, impl="triton")
    table = state.clone()
    got = spec.chunk(**x, state=table, slots=torch.arange(4), cu_seqlens=ends, impl="triton")
    assert torch.equal(got[0], want[0]) and torch.equal(table[[0, 2, 3]], want[1][[0, 2, 3]])


@pytest.mark.parametrize("gate", ("scalar", "channel"))
@pytest.mark.parametrize("cu_seqlens", (None, torch.tensor([0, 2, 2, T])), ids=("batch", "packed"))
def test_power_of_two_scaling_goes_by_what_the_slots_hold(gate, cu_seqlens, bfloat16_in_the_interpreter, monkeypatch):
    """A slot that nothing reads, NaN or huge, changes no power. Packed sequences are in segments too."""
    in_segments(0 if cu_seqlens is None else 1, monkeypatch)
    B = 3 if cu_seqlens is None else 1
    x = make(SPECS["delta/gla"], B, T)
    x = {n: (40 * y).bfloat16() if n in "qkv" else y.float() for n, y in x.items()}
    x["g"] = x["g"][..., 0].contiguous() if gate == "scalar" else x["g"]
    start = 1e6 * torch.randn(3, 2, 16, 12, generator=torch.Generator().manual_seed(0))
    table = torch.full((5, 2, 16, 12), torch.nan)
    table[3], table[0], table[1] = start[0], start[1], 1e30
    slots, fresh = torch.tensor([3, 0, 1]), torch.tensor([False, False, True])
    start[2] = 0
    if cu_seqlens is not None:
        start[1] = 0  # an empty sequence's does not count
    call = partial(chunk_delta, **x, cu_seqlens=cu_seqlens, impl="triton")
    o, state = call(initial_state=start, output_final_state=True)
    before = table.clone()
    assert torch.equal(call(state=table, slots=slots, fresh=fresh).o, o)
    assert torch.equal(table[[3, 1]], state[[0, 2]]) and table[[2, 4]].isnan().all()
    assert torch.equal(table[0], state[1] if cu_seqlens is None else before[0])


@pytest.mark.parametrize("rule, ends", (("qdelta", None), ("delta/gated", [0, 7, T]), ("delta/gdn2", [0, 7, T])))
def test_a_call_on_a_table_reads_nothing_back(rule, ends, monkeypatch):
    """What the host asked a tensor for, a CUDA graph could not hold."""
    x = make(SPECS[rule], 2 if ends is None else 1, T)
    table, slots, fresh = SPECS[rule].table(4), torch.tensor([3, -1]), torch.tensor([True, False])
    ends = None if ends is None else torch.tensor(ends)
    read_back = lambda *_: pytest.fail("a number was read back")
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, read_back)
    SPECS[rule].chunk(**x, state=table, slots=slots, fresh=fresh, cu_seqlens=ends, impl="triton")


def test_operators_on_a_table_pass_opcheck():
    from needlework.ops.delta.channel.op import delta_channel_on_table
    from needlework.ops.delta.scalar.op import delta_scalar_on_table
    from needlework.ops.slots.kernels import largest_of_slots

    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    table = lambda H: torch.zeros(4, H, 16, 12, dtype=torch.float64)
    slots, fresh = torch.tensor([2, -1]), torch.tensor([False, True])
    ends = torch.tensor([0, 7, T])
    for N, cu_seqlens in ((2, None), (1, ends)):
        x = make(SPECS["qdelta"], N, T)
        tensors = DeltaInputs(*(x.get(name) for name in DeltaInputs._fields))
        check(delta_scalar_on_table, (*tensors, table(x["v"].shape[2]), slots, fresh, None, cu_seqlens, 0.25))
        x = make(SPECS["delta/gdn2"], N, T)
        tensors = DeltaInputs(*(x.get(name) for name in DeltaInputs._fields))
        check(delta_channel_on_table, (*tensors, table(2), slots, fresh, None, cu_seqlens, 0.25, "decayed"))
    check(largest_of_slots, (table(2), slots, fresh, ends, 2))


@pytest.mark.parametrize("impl", ("torch", "triton"))
def test_the_compiler_takes_a_call_on_a_table_whole(impl):
    torch._dynamo.reset()
    x = make(SPECS["delta/gated"], 2, T)
    slots, fresh = torch.tensor([2, 0]), torch.tensor([False, True])

    def call(table):
        return chunk_delta(**x, state=table, slots=slots, fresh=fresh, impl=impl).o

    ours, theirs = (torch.ones(3, 4, 16, 12, dtype=torch.float64) for _ in range(2))
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(ours), call(theirs))
    assert torch.equal(ours, theirs) and bool((ours[1] == 1).all())
