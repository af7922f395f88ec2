"""Triton steps against the definition, token by token, on a slot table in place."""

import os
from functools import partial
from itertools import product

import pytest
import torch

from needlework.ops.carve import spec as carve
from needlework.ops.carve.arguments import CarveInputs, Settings
from needlework.ops.carve.op import recurrent_carve
from needlework.ops.carve.state import empty_state as empty_carve
from needlework.ops.ccq import spec as ccq
from needlework.ops.ccq.arguments import CcqInputs
from needlework.ops.ccq.reference import recurrent_ccq
from needlework.ops.ccq.state import empty_state as empty_ccq
from needlework.ops.common.samples import decay, normal, uniform, unit
from needlework.ops.delta import recurrent_delta
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.mamba3 import spec as mamba3
from needlework.ops.mamba3.state import empty_state as empty_mamba3
from needlework.ops.qdelta import recurrent_qdelta
from needlework.ops.runtime.launch_configs import forced
from needlework.testing.compare import assert_close, leaves, like
from needlework.testing.rows import chosen, covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

SLOTS = torch.tensor([2, -1, 0])  # out of order, a padded row, slots 1 and 3 nobody's
OWNER = torch.tensor([2, 0])  # the slots of sequences 0 and 1
ROWS = torch.tensor([0, 0, 1])  # the padded row brings live values, which must go nowhere
H, K, V, T = 2, 20, 12, 9


def delta_inputs(rule: str, *, HV: int = H, gate: str = "scalar", K: int = K, V: int = V) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    B = len(OWNER)
    inputs = {
        "q": unit(normal(generator, B, T, H, K)),
        "k": unit(normal(generator, B, T, H, K)),
        "v": normal(generator, B, T, HV, V),
    }
    if gate != "none":
        inputs["g"] = decay(generator, B, T, HV, *([K] if gate == "channel" else []), style="random")
    if rule in ("beta", "lam"):
        inputs["beta"] = uniform(generator, 0.1, 1.0, B, T, HV)
    if rule == "lam":
        inputs["lam"] = uniform(generator, 0.1, 1.0, B, T, HV)
    if rule == "erase":
        inputs["erase"] = uniform(generator, 0, 1, B, T, HV, K)
        inputs["write"] = uniform(generator, 0, 1, B, T, HV, V)
    return inputs


def filled(table):
    """Random numbers in every floating column of a state table: a slot that must not change is not zero either."""
    generator = torch.Generator().manual_seed(1)
    for _, x in leaves(table):
        if x.is_floating_point():
            x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    return table


def in_one_buffer(table):
    """The table with all that belongs to a slot in one run of bytes, and eight bytes between the tensors that nobody owns."""
    sizes = [x[0].numel() * x.element_size() + 8 for _, x in leaves(table)]
    buffer = torch.zeros(len(next(leaves(table))[1]), sum(sizes), dtype=torch.uint8)
    parts = buffer.split(sizes, 1)
    views = (part[:, :-8].view(x.dtype).view(x.shape) for part, (_, x) in zip(parts, leaves(table), strict=True))
    return like(table, (view.copy_(x) for view, (_, x) in zip(views, leaves(table), strict=True)))


def as_it_is(table):
    return table


def check_steps(step, recurrent, inputs: dict, table, parameters: dict = {}, slots=SLOTS, rows=ROWS, owner=OWNER):  # noqa: B006
    """`step` on every token against `recurrent` on all of them: outputs, states, and what must stay as it was."""
    rest = sorted(set(range(len(next(leaves(table))[1]))) - set(owner.tolist()))
    before = {name: x.clone() for name, x in leaves(table)}
    pick = lambda x: x[owner].clone()
    initial = pick(table) if isinstance(table, torch.Tensor) else type(table)(*map(pick, table))
    expected, final = recurrent(**inputs, **parameters, initial_state=initial, output_final_state=True)
    for t in range(next(iter(inputs.values())).shape[1]):
        got = step({name: x[rows, t] for name, x in inputs.items()} | parameters, table, slots)
        live = torch.arange(len(rows)) if slots is None else slots >= 0
        assert_close({"o": got[live]}, {"o": expected[:, t]}, f"token {t}")
        if slots is not None:
            assert not got[slots < 0].any(), "a padded row is not zero"
    assert_close({n: x[owner] for n, x in leaves(table)}, dict(leaves(final)), "state")
    for name, x in leaves(table):
        assert torch.equal(x[rest], before[name][rest]), f"{name}: a slot that no row owns has changed"


def delta_step(x: dict, state, slots, *, prediction="decayed", l2norm=False):
    from needlework.ops.delta.step import step

    return step(DeltaInputs(**x), state, slots, scale=0.3, prediction=prediction, l2norm=l2norm)


def carve_step(x: dict, state, slots, *, content_chunk=4, prediction="previous"):
    from needlework.ops.carve.step import step

    x = dict(x)
    b_bias = x.pop("b_bias", None)
    return step(CarveInputs(**x), b_bias, state, slots, Settings(content_chunk, prediction, 0.3))


def ccq_step(x: dict, state, slots):
    from needlework.ops.ccq.step import step

    return step(CcqInputs(x["q"], x["k"], x["eta"], x.get("g")), state, slots)


def check_delta(inputs: dict, *, prediction="decayed", **given) -> None:
    HV, (K, V) = inputs["v"].shape[2], (inputs["k"].shape[-1], inputs["v"].shape[-1])
    table = filled(torch.zeros(4, HV, K, V, dtype=torch.float64))
    if "lam" in inputs:
        recurrent = partial(recurrent_qdelta, scale=0.3)
    else:
        recurrent = partial(recurrent_delta, scale=0.3, prediction=prediction)
    check_steps(partial(delta_step, prediction=prediction), recurrent, inputs, table, **given)


@pytest.mark.parametrize(
    "rule, gate",
    chosen(
        product(["additive", "beta", "lam", "erase"], ["none", "scalar", "channel"]),
        quick=[
            ("additive", "none"), ("additive", "channel"), ("beta", "scalar"), ("beta", "channel"), ("lam", "scalar"),
            ("erase", "channel"),
        ],
    ),
)  # fmt: skip
def test_a_delta_step_is_the_definition_s_token(rule, gate):
    inputs = delta_inputs(rule, gate=gate)
    if rule == "lam" and gate == "none":  # Q-Delta's g has no default
        inputs["g"] = torch.zeros_like(inputs["lam"])
    check_delta(inputs)


@pytest.mark.parametrize("rule, gate", covering(["beta", "erase"], ["scalar", "channel"], pairs=False))
def test_a_delta_step_can_predict_from_the_state_before_decay(rule, gate):
    check_delta(delta_inputs(rule, gate=gate), prediction="previous")


def test_a_delta_step_can_erase_along_a_direction_of_its_own():
    check_delta(delta_inputs("erase", gate="channel"), prediction="given")


@pytest.mark.parametrize("heads", [H, 4])
def test_a_delta_step_groups_value_heads_and_reads_with_its_own_query(heads):
    inputs = delta_inputs("lam", HV=4)
    inputs["q_read"] = normal(torch.Generator().manual_seed(2), len(OWNER), T, heads, K)
    check_delta(inputs)


@pytest.mark.parametrize(("K", "V", "BV"), [(1, 1, 32), (7, 40, 16), (40, 33, 64)])
def test_a_delta_step_takes_any_size(K, V, BV):
    with forced("delta/step", "plain", step={"BV": BV}):
        check_delta(delta_inputs("beta", gate="channel", K=K, V=V))


def test_a_delta_step_makes_unit_vectors_of_queries_and_keys_but_not_of_what_reads():
    inputs = delta_inputs("lam")
    inputs["q"], inputs["k"] = 3 * inputs["q"], 1e-3 * inputs["k"]  # so small that 1e-6 counts
    recurrent = partial(recurrent_qdelta, scale=0.3, l2norm=True)
    for given in (inputs, inputs | {"q_read": 2 * inputs["q"]}):
        table = filled(torch.zeros(4, H, K, V, dtype=torch.float64))
        check_steps(partial(delta_step, l2norm=True), recurrent, given, table)


def test_a_delta_step_without_slots_takes_row_b_to_slot_b():
    both = torch.arange(2)
    check_delta(delta_inputs("beta"), slots=None, rows=both, owner=both)


def test_a_delta_step_walks_a_table_that_is_one_layer_of_many():
    layers = filled(torch.zeros(4, 3, H, K, V, dtype=torch.float64))
    others = layers[:, ::2].clone()
    check_steps(delta_step, partial(recurrent_delta, scale=0.3), delta_inputs("beta"), layers[:, 1])
    assert torch.equal(layers[:, ::2], others)


def test_a_delta_step_takes_slots_that_are_views_of_bytes():
    table = in_one_buffer(filled(torch.zeros(4, H, K, V, dtype=torch.float64)))
    check_steps(delta_step, partial(recurrent_delta, scale=0.3), delta_inputs("beta"), table)


def test_a_delta_step_reaches_slots_beyond_two_to_the_31():
    """Three slots, so far apart that an int32 offset of the last would be negative; memory never touched is never there."""
    size = 2**30 + 5
    table = torch.empty(3 * size, dtype=torch.float32).as_strided((3, 1, 4, 4), (size, 16, 4, 1))
    table[2], x = 0.0, torch.ones(1, 1, 4)
    o = delta_step({"q": x, "k": x, "v": x}, table, torch.tensor([2]))
    assert torch.equal(table[2], torch.ones(1, 4, 4)) and torch.allclose(o, torch.full((1, 1, 4), 1.2))


@pytest.mark.parametrize(
    "R, prediction, lay, bias",
    covering([1, 2, 4], ["previous", "decayed"], [as_it_is, in_one_buffer], [True, False], pairs=False),
)
def test_a_carve_step_is_the_definition_s_token(prediction, R, lay, bias):
    """Rows start at different positions, and content chunks of 4 end at different tokens; slots may lie apart."""
    inputs = carve.sample(torch.Generator().manual_seed(0), len(OWNER), T, "strong", R=R)
    if not bias:
        inputs["b"] = inputs["b"] + inputs.pop("b_bias")
    parameters = {name: inputs.pop(name) for name in ("A_log", "dt_bias", "w1", "w2", "b_bias") if name in inputs}
    table = lay(filled(empty_carve(4, carve.H, carve.K, carve.V, dtype=torch.float64)))
    table.position.copy_(torch.tensor([1, 2, 3, 0]))
    settings = {"content_chunk": 4, "prediction": prediction}

    def recurrent(b, b_bias=0.0, **x):
        return recurrent_carve(b=b + b_bias, scale=0.3, **settings, **x)

    with forced("carve/step", step={"BV": 8, "BR": 2, "BLOCK": 16}):
        check_steps(partial(carve_step, **settings), recurrent, inputs, table, parameters)


@pytest.mark.parametrize("lay", [as_it_is, in_one_buffer])
@pytest.mark.parametrize("HV, aligned", covering([ccq.H, 2 * ccq.H], [False, True]))
def test_a_ccq_step_is_the_definition_s_token(aligned, HV, lay):
    inputs = ccq.sample(torch.Generator().manual_seed(0), len(OWNER), T, "random", HV=HV, aligned=aligned)
    generator = torch.Generator().manual_seed(3)
    warm = ccq.sample(generator, 4, 5, "random", HV=HV, aligned=aligned)
    table = lay(recurrent_ccq(**warm, output_final_state=True).state)
    with forced("ccq/step", step={"BV": 8}):
        check_steps(ccq_step, recurrent_ccq, inputs, table, slots=SLOTS.int())


def test_a_ccq_step_starts_from_nothing_at_sizes_that_are_no_power_of_two():
    generator = torch.Generator().manual_seed(0)
    B, K = len(OWNER), 13
    inputs = {"q": normal(generator, B, T, H, K), "k": unit(normal(generator, B, T, H, K))}
    inputs["eta"] = uniform(generator, 0, 1, B, T, H)
    check_steps(ccq_step, recurrent_ccq, inputs, empty_ccq(4, H, K, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_steps_compute_in_float32_and_answer_in_the_query_s_dtype(dtype):
    inputs = {name: x.to(dtype) for name, x in delta_inputs("lam", gate="channel").items()}
    table = torch.zeros(2, H, K, V)
    o = delta_step({name: x[:, 0] for name, x in inputs.items()}, table, None)
    exact, state = recurrent_qdelta(**{n: x[:, :1].double() for n, x in inputs.items()}, scale=0.3, output_final_state=True)
    assert o.dtype == dtype and table.dtype == torch.float32
    assert_close({"state": table}, {"state": state}, "state", bound=1e-6)
    assert_close({"o": o}, {"o": exact[:, 0]}, "o", bound=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("slots", [None, torch.tensor([1, 0])])
def test_steps_pass_opcheck(slots):
    from needlework.ops.carve.step import carve_step
    from needlework.ops.ccq.step import ccq_step
    from needlework.ops.delta.step import delta_step
    from needlework.ops.mamba3.step import mamba3_step

    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    x = {name: x[:, 0] for name, x in delta_inputs("lam", HV=4).items()}
    check(delta_step, (*DeltaInputs(**x), torch.zeros(2, 4, K, V, dtype=torch.float64), slots, 0.3, "decayed", True))

    x = carve.sample(torch.Generator().manual_seed(0), 2, 1, "random", R=2)
    tensors = [x[:, 0] if name in ("q", "k", "v", "f", "b", "w") else x for name, x in x.items()]
    state = empty_carve(2, carve.H, carve.K, carve.V, dtype=torch.float64)
    check(carve_step, (*tensors, *state, slots, 1, "previous", 0.3))

    x = ccq.sample(torch.Generator().manual_seed(0), 2, 1, "random", aligned=True)
    state = empty_ccq(2, ccq.H, ccq.K, dtype=torch.float64)
    check(ccq_step, (*(x[name][:, 0] for name in ("q", "k", "eta", "g")), *state, slots))

    x = mamba3.sample(torch.Generator().manual_seed(0), 2, 1, "random", R=2)
    tokens = (x[name][:, 0] for name in ("q", "k", "v", "g", "dt", "lam", "angle"))
    state = empty_mamba3(2, mamba3.HV, mamba3.K, mamba3.V, mamba3.M, 2, dtype=torch.float64)
    check(mamba3_step, (*tokens, x["q_bias"], x["k_bias"], x["mimo_x"], *state, slots, True))


def test_a_step_refuses_a_slot_that_is_not_contiguous():
    state = empty_carve(2, carve.H, carve.K, carve.V)
    x = carve.sample(torch.Generator().manual_seed(0), 2, 1, "random")
    x = {name: x[:, 0] if name in ("q", "k", "v", "f", "b", "w") else x for name, x in x.items()}
    with pytest.raises(ValueError, match=r"state.S: a slot must be contiguous, got strides"):
        carve_step(x, state._replace(S=state.S.mT.contiguous().mT), None)


def test_a_step_compiles_without_a_graph_break_and_still_changes_its_table():
    x = {name: x[:, 0] for name, x in delta_inputs("lam").items()}
    table = filled(torch.zeros(2, H, K, V, dtype=torch.float64))
    other = table.clone()
    compiled = torch.compile(delta_step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, table, None), delta_step(x, other, None)) and torch.equal(table, other)


def test_steps_take_no_rows():
    x = {name: x[:0, 0] for name, x in delta_inputs("beta").items()}
    table = torch.ones(2, H, K, V, dtype=torch.float64)
    assert delta_step(x, table, torch.empty(0, dtype=torch.int64)).shape == (0, H, V)
    assert (table == 1).all()


@pytest.mark.parametrize("engine", ["delta/step", "carve/step", "ccq/step"])
def test_every_launch_config_names_its_launches(engine):
    from importlib import import_module

    from needlework.ops.runtime.launch_configs import rows

    module = import_module(f"needlework.ops.{engine.replace('/', '.')}")
    for config in rows(engine):
        for case in module.compile_cases(config, torch.bfloat16, 128, 128):
            given = {**case.signature, **case.constexprs}
            assert set(case.kernel.arg_names) == set(given), f"{engine}/{config.name}: {case.kernel}"
