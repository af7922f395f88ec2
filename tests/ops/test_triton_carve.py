"""CARVE's forward in Triton against the definition: float64, then the error budget, then what is promised bit by bit."""

import os
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch

from needlework.ops.carve import CarveState, chunk_carve, recurrent_carve, step_carve
from needlework.ops.carve.arguments import CarveInputs, checked
from needlework.ops.carve.spec import SPECS, H, K, V, literal, sample
from needlework.ops.common.samples import normal
from needlework.ops.runtime import launch_configs
from needlework.testing.compare import assert_close, leaves
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.rows import chosen, covering
from needlework.testing.slots import slots_hold_states

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

TOKENS = ("q", "k", "v", "f", "b", "w")
NAMES = (*TOKENS, "A_log", "dt_bias", "w1", "w2")


def inputs_of(B, T, R=1, style="random", seed=0):
    return sample(torch.Generator().manual_seed(seed), B, T, style, R=R)


def state_of(position, seed=1):
    g, N = torch.Generator().manual_seed(seed), len(position)
    return CarveState(normal(g, N, H, K, V), normal(g, N, H, V), normal(g, N, H, V), torch.tensor(position))


def ours(*, content_chunk=64, prediction="previous", scale=None, initial_state=None, cu_seqlens=None, **inputs):
    from needlework.ops.carve.feedback.op import carve

    given, b_bias = CarveInputs(*(inputs[name] for name in NAMES)), inputs["b_bias"]
    tensors, settings = checked(given, b_bias, content_chunk, prediction, scale, initial_state, cu_seqlens)
    return carve(tensors, b_bias, initial_state, cu_seqlens, settings)


def part(inputs, a, b):
    return {name: x[:, a:b] if name in TOKENS else x for name, x in inputs.items()}


def assert_same(inputs, **settings):
    got, wanted = ours(**inputs, **settings), recurrent_carve(**inputs, **settings, output_final_state=True)
    assert torch.equal(got.state.position, wanted.state.position)
    assert_close(dict(leaves(got)), dict(leaves(wanted)), str({n: x for n, x in settings.items() if isinstance(x, int | str)}))


@pytest.mark.parametrize(
    ("sizes", "R", "prediction"),
    chosen(
        product([(8, 37), (20, 40), (64, 100), (7, 13), (1, 3), (10**6, 33)], [1, 2, 4], ["previous", "decayed"]),
        quick=[
            ((8, 37), 1, "previous"), ((20, 40), 2, "decayed"), ((64, 100), 4, "previous"),
            ((7, 13), 2, "previous"), ((1, 3), 4, "decayed"), ((10**6, 33), 1, "decayed"),
        ],
    ),
)  # fmt: skip
def test_it_is_the_definition(sizes, R, prediction):
    content_chunk, T = sizes
    assert_same(inputs_of(1, T, R), content_chunk=content_chunk, prediction=prediction)


def test_no_bias_is_a_bias_of_zero():
    inputs = inputs_of(1, 20)
    zero = {**inputs, "b_bias": torch.zeros_like(inputs.pop("b_bias"))}
    without, given = (chunk_carve(**x, content_chunk=8, impl="triton", output_final_state=True) for x in (inputs, zero))
    assert_bit_equal(without, given)


@pytest.mark.parametrize("style", ["identical", "strong"])
def test_strong_gates_and_identical_keys_change_nothing(style):
    assert_same(inputs_of(2, 40, style=style), content_chunk=16)


@pytest.mark.parametrize("where, R", covering([(8, [0, 7, 3]), (40, [0, 37, 21])], [1, 2], pairs=False))
def test_rows_resume_at_any_token(where, R):
    content_chunk, position = where
    assert_same(inputs_of(3, 30, R), content_chunk=content_chunk, initial_state=state_of(position))


@pytest.mark.parametrize("resumed, R", covering([False, True], [1, 2], pairs=False))
def test_packed_sequences_are_the_sequences_also_an_empty_one(resumed, R):
    state = state_of([7, 2, 0, 5]) if resumed else None
    assert_same(inputs_of(1, 31, R), content_chunk=8, initial_state=state, cu_seqlens=torch.tensor([0, 4, 4, 20, 31]))


@pytest.mark.parametrize("resumed", [False, True])
def test_without_tokens_the_state_stays(resumed):
    assert_same(inputs_of(2, 0), content_chunk=8, initial_state=state_of([3, 0]) if resumed else None)


def test_cuts_inside_a_content_chunk_carry_on():
    inputs, state = inputs_of(2, 41), None
    outputs = []
    for a, b in pairwise((0, 5, 6, 30, 41)):
        o, state = ours(**part(inputs, a, b), content_chunk=16, initial_state=state)
        outputs.append(o)
    o, final = recurrent_carve(**inputs, content_chunk=16, output_final_state=True)
    assert_close({"o": torch.cat(outputs, 1), **state._asdict()}, {"o": o, **final._asdict()}, "in pieces")


@pytest.mark.parametrize("C, tma, R", covering([16, 32], [False, True], [1, 2]))
def test_launch_configs_change_nothing(C, tma, R, monkeypatch):
    rows = launch_configs.rows
    monkeypatch.setattr(launch_configs, "rows", lambda engine: tuple(row._replace(tma=tma) for row in rows(engine)))
    with launch_configs.forced("delta/channel", "plain", shared={"C": C}, scan={"BV": 32}):
        assert_same(inputs_of(2, 40, R), content_chunk=24)


@pytest.mark.parametrize("dtype, size", covering([torch.float64, torch.float16], [30.0, 1e4], pairs=False))
def test_saturated_gates_stay_finite_and_right(dtype, size):
    inputs = inputs_of(2, 40)
    inputs["A_log"] += 2  # gates below −65504
    for name, seed in (("f", 2), ("b", 3)):
        sign = torch.randint(0, 3, inputs[name].shape, generator=torch.Generator().manual_seed(seed)) - 1
        inputs[name] = torch.where(sign == 0, inputs[name], size * sign)
    inputs = {name: x.to(dtype).double() for name, x in inputs.items()}
    got = ours(**{name: x.to(dtype) for name, x in inputs.items()}, content_chunk=16)
    wanted = recurrent_carve(**inputs, content_chunk=16, output_final_state=True)
    assert_close(dict(leaves(got)), dict(leaves(wanted)), f"{size}", 1e-12 if dtype == torch.float64 else 3e-3)


@pytest.mark.parametrize(
    "style, dtype", covering(["random", "identical", "strong"], [torch.float16, torch.float32], pairs=False)
)
def test_results_keep_the_error_budget(style, dtype):
    """Twice the definition's own error at this dtype."""
    kept, wide, single = stored(inputs_of(4, 64, style=style), dtype, ("q", "k", "v", "f", "b"))
    settings = {"content_chunk": 16, "output_final_state": True}
    runs = (
        ours(**kept, content_chunk=16),
        recurrent_carve(**wide, **settings),
        recurrent_carve(**single, **settings, operand=operand(dtype)),
        literal(**single, **settings, operand=operand(dtype)),
    )
    assert_within_budget(over_budget(*(dict(leaves(run)) for run in runs), heads={"o": 2}))


def assert_bit_equal(a, b):
    for (name, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_w2_content_is_bit_equal_to_none(dtype):
    inputs = {name: x.to(dtype) for name, x in inputs_of(2, 64).items()}
    inputs["w2"].zero_()
    with_content, blind = ours(**inputs, content_chunk=16), ours(**inputs, content_chunk=10**6)
    assert with_content.state.m.any()
    assert_bit_equal((with_content.o, with_content.state.S), (blind.o, blind.state.S))


@pytest.mark.parametrize("content_chunk", [16, 24])
def test_cut_where_content_chunks_end_pieces_are_bit_equal_to_one_call(content_chunk):
    L = content_chunk
    inputs = {name: x.float() for name, x in inputs_of(2, 5 * L).items()}
    whole, state, outputs = ours(**inputs, content_chunk=L), None, []
    for a, b in pairwise((0, L, 4 * L, 5 * L)):
        o, state = ours(**part(inputs, a, b), content_chunk=L, initial_state=state)
        outputs.append(o)
    assert_bit_equal((torch.cat(outputs, 1), state), (whole.o, whole.state))


def test_what_is_kept_is_the_state_at_every_content_chunks_start():
    from needlework.ops.carve.feedback.op import carve_triton_fwd

    L, position, ends = 8, [7, 2, 0, 5], [0, 4, 4, 20, 31]
    inputs, state = inputs_of(1, 31), state_of(position)
    settings = {"content_chunk": L, "prediction": "previous", "scale": 0.25}
    tensors = (*(inputs[name] for name in (*NAMES, "b_bias")), *state)
    results = carve_triton_fwd(*tensors, torch.tensor(ends), *settings.values(), 1, True)
    kept_S, kept_m = results[5:7]
    slot = 0
    for n, (a, b) in enumerate(pairwise(ends)):
        start, now = a, CarveState(*(x[n : n + 1] for x in state))
        while start < b:
            assert_close({"S": kept_S[slot], "m": kept_m[slot]}, {"S": now.S[0], "m": now.m[0]}, f"sequence {n}, token {start}")
            stop = min(b, start + L - int(now.position))
            now = recurrent_carve(**part(inputs, start, stop), **settings, initial_state=now, output_final_state=True).state
            start, slot = stop, slot + 1
    assert slot <= len(kept_S)


@pytest.mark.parametrize("save, kind, R", covering([False, True], ["batch", "resumed", "packed"], [1, 2], pairs=False))
def test_torch_library_accepts_the_operator(save, kind, R):
    from needlework.ops.carve.feedback.op import carve_triton_fwd

    T = 22 * R
    x = inputs_of(1 if kind == "packed" else 2, T)
    cu_seqlens = torch.tensor([0, 9, 22]) if kind == "packed" else None
    state = (None,) * 4 if kind == "batch" else tuple(state_of([3, 0]))
    args = (*(x[name] for name in (*NAMES, "b_bias")), *state, cu_seqlens, 8, "previous", 0.25, R, save)
    torch.library.opcheck(carve_triton_fwd, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "spec", [replace(spec, chunk=partial(spec.chunk, content_chunk=8)) for spec in SPECS], ids=lambda x: x.name
)
def test_slots_of_a_table_hold_the_states(spec):
    """Content chunks of 8 hand S on, also of a sequence that owns no slot, and calls are cut inside one."""
    slots_hold_states(spec, T=22, impls=("triton",))


def table_of(position):
    """A table whose slots lie apart."""
    return CarveState(*(torch.stack((x, x), 1)[:, 1] for x in state_of(position)))


def test_prefill_and_steps_take_turns_on_one_table():
    inputs, table = inputs_of(3, 23), table_of([1, 2, 7, 0, 5])
    settings, slots = {"content_chunk": 8}, torch.tensor([4, 2, 3])
    start = CarveState(*(x[slots] for x in table))
    wanted = recurrent_carve(**inputs, **settings, initial_state=start, output_final_state=True)
    outputs = []
    for a, b in pairwise((0, 9, 10, 11, 23)):
        if b - a > 1:
            outputs.append(chunk_carve(**part(inputs, a, b), **settings, state=table, slots=slots, impl="triton").o)
        else:
            now = {name: x[:, a] if name in TOKENS else x for name, x in inputs.items()}
            outputs.append(step_carve(**now, **settings, state=table, slots=slots)[:, None])
    found = {"o": torch.cat(outputs, 1), **{name: x[slots] for name, x in table._asdict().items()}}
    assert_close(found, {"o": wanted.o, **wanted.state._asdict()}, "in turns")


def test_sequences_of_no_slot_do_not_meet():
    """Three of them, each through three content chunks; between them one on a table."""
    inputs, table = inputs_of(4, 23), table_of([1, 2])
    wanted = recurrent_carve(**inputs, content_chunk=8, initial_state=None)
    before = [x.clone() for x in table]
    slots, fresh = torch.tensor([-1, -1, 0, -1]), torch.tensor([False, False, True, True])
    o = chunk_carve(**inputs, content_chunk=8, state=table, slots=slots, fresh=fresh, impl="triton").o
    assert_close({"o": o}, {"o": wanted.o}, "without slots")
    assert all(torch.equal(x[1], old[1]) for x, old in zip(table, before, strict=True))


@pytest.mark.parametrize("R, ends", covering([1, 4], [None, torch.tensor([0, 4, 4, 13])], pairs=False))
def test_a_call_on_a_table_reads_nothing_back(R, ends, monkeypatch):
    """What the host asked a tensor for, a CUDA graph could not hold."""
    inputs, table = inputs_of(3 if ends is None else 1, 13, R), table_of([1, 2, 7, 0, 5])
    call = partial(chunk_carve, **inputs, content_chunk=8, cu_seqlens=ends, state=table, impl="triton")
    slots, fresh = torch.tensor([4, 2, -1]), torch.tensor([True, False, False])
    read_back = lambda *_: pytest.fail("a number was read back")
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, read_back)
    call(slots=slots, fresh=fresh)


@pytest.mark.parametrize("packed, R", covering([False, True], [1, 2], pairs=False))
def test_torch_library_accepts_the_operator_on_a_table(packed, R):
    from needlework.ops.carve.feedback.op import carve_triton_slots

    x, table = inputs_of(1 if packed else 2, 22 * R), table_of([3, 0, 5, 7])
    of_sequences = torch.tensor([3, -1]), torch.tensor([True, False]), torch.tensor([0, 9, 22]) if packed else None
    args = (*(x[name] for name in (*NAMES, "b_bias")), *table, *of_sequences, 8, "previous", 0.25, R)
    torch.library.opcheck(carve_triton_slots, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_the_op_is_one_node_of_a_compiled_graph():
    inputs = {name: x.float() for name, x in inputs_of(2, 20).items()}
    run = lambda x: tuple(y for _, y in leaves(ours(**x, content_chunk=8)))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(inputs), run(inputs), strict=True))
