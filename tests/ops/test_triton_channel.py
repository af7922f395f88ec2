"""The channel-gate engine in Triton against the definition: every rule, in float64, then within the error budget."""

import os

import pytest
import torch

from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.recurrent import recurrent_delta
from needlework.ops.delta.spec import literal
from needlework.ops.runtime import launch_configs
from needlework.testing.compare import EXACT, assert_close, differentiate, relative
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.rows import covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

H, HV, K, V = 1, 2, 16, 12
RULES = {  # what the rule takes besides q, k, v and g, and what it predicts from
    "gla": ((), "decayed"),
    "kda": (("beta",), "decayed"),
    "previous": (("beta",), "previous"),
    "gdn2": (("erase", "write"), "decayed"),
    "gdn2 previous": (("erase", "write"), "previous"),
    "given": (("erase", "write"), "given"),
}


def sample(rule, B=1, T=37, style="random", dtype=torch.float64, N=None, K=K, V=V, HV=HV):
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "q": unit(normal(generator, B, T, H, K)),
        "k": keys(generator, B, T, H, K, style),
        "v": normal(generator, B, T, HV, V),
        "g": decay(generator, B, T, HV, K, style=style),
        "beta": uniform(generator, 0.1, 1.0, B, T, HV),
        "erase": uniform(generator, 0, 1, B, T, HV, K),
        "write": uniform(generator, 0, 1, B, T, HV, V),
        "initial_state": normal(generator, B if N is None else N, HV, K, V),
    }
    chosen = ("q", "k", "v", "g", *RULES[rule][0], "initial_state")
    return {name: inputs[name].to(dtype) for name in chosen}


def engine(rule, cu_seqlens=None, R=1, scale=0.3):
    from needlework.ops.delta.channel.op import channel

    def call(inputs):
        return channel(DeltaInputs(**inputs), cu_seqlens, scale=scale, prediction=RULES[rule][1], R=R)

    return call


def definition(rule, cu_seqlens=None, scale=0.3):
    settings = {"cu_seqlens": cu_seqlens, "scale": scale, "prediction": RULES[rule][1], "output_final_state": True}
    return lambda inputs: tuple(recurrent_delta(**inputs, **settings))


def assert_same(ours, theirs, inputs, what, bound=EXACT):
    (values, gradients), (expected, expected_gradients) = differentiate(ours, inputs), differentiate(theirs, inputs)
    assert_close(values, expected, what, bound)
    assert_close(gradients, expected_gradients, what, bound)


@pytest.mark.parametrize("rule, T", covering([*RULES], [37, 63, 1], pairs=False))
def test_it_is_the_definition_with_gradients_and_grouped_values(rule, T):
    assert_same(engine(rule), definition(rule), sample(rule, B=2 if T == 37 else 1, T=T), rule)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("rule", ["gla", "kda", "gdn2"])
def test_keys_of_three_tiles(rule, tma, monkeypatch):
    """The last tile is partly past the keys; a second chunk decays all three."""
    rows = launch_configs.rows
    monkeypatch.setattr(launch_configs, "rows", lambda engine: tuple(row._replace(tma=tma) for row in rows(engine)))
    with launch_configs.forced("delta/channel", "plain"):
        assert_same(engine(rule), definition(rule), sample(rule, T=21, K=136), f"{rule}, K = 136")


@pytest.mark.parametrize("anchor", [1, 2])
@pytest.mark.parametrize("rule", ["gla", "kda", "gdn2 previous"])
def test_values_of_three_replays(rule, anchor):
    """The last one is partly past the values; with an anchor every second chunk the first one's sums are read once."""
    with launch_configs.forced("delta/channel", "plain", pairs={"ANCHOR": anchor}):
        assert_same(engine(rule), definition(rule), sample(rule, T=53, V=264), f"{rule}, V = 264")


@pytest.mark.parametrize("rule, style", covering(["kda", "previous"], ["strong", "identical"], pairs=False))
def test_strong_gates_and_identical_keys_change_nothing(rule, style):
    assert_same(engine(rule), definition(rule), sample(rule, T=37, style=style), f"{rule}, {style}")


@pytest.mark.parametrize("rule", ["gla", "kda", "gdn2"])
def test_packed_sequences_are_the_sequences_also_an_empty_one(rule):
    cu_seqlens = torch.tensor([0, 17, 17, 36, 37])
    inputs = sample(rule, T=37, N=4)
    assert_same(engine(rule, cu_seqlens), definition(rule, cu_seqlens), inputs, f"{rule}, packed")


@pytest.mark.parametrize("rule", ["gla", "gdn2 previous"])
def test_without_tokens_the_state_stays(rule):
    assert_same(engine(rule), definition(rule), sample(rule, T=0), f"{rule}, T = 0")


def test_a_state_is_zero_where_none_is_given():
    inputs = sample("kda")
    del inputs["initial_state"]
    assert_same(engine("kda"), definition("kda"), inputs, "no initial state")


@pytest.mark.parametrize("rule, C", covering([*RULES], [16, 32], pairs=False))
def test_descriptors_read_what_pointers_read(rule, C, monkeypatch):
    rows = launch_configs.rows
    monkeypatch.setattr(launch_configs, "rows", lambda engine: tuple(row._replace(tma=True) for row in rows(engine)))
    inputs = sample(rule, B=2, T=37, V=24)
    with launch_configs.forced("delta/channel", "plain", shared={"C": C}, scan={"BV": 16}):
        assert_same(engine(rule), definition(rule), inputs, f"{rule}, descriptors, C = {C}")


@pytest.mark.parametrize("rule, R", covering(["kda", "previous", "gla"], [2, 4], pairs=False))
def test_rows_of_a_token_do_not_see_each_other(rule, R):
    """Against the chunk form in plain tensors, which takes R rows a token."""
    from needlework.ops.delta.custom_op import delta_fwd

    B, T, scale = 1, 21, 0.3
    rows = sample(rule, B, T * R, HV=H)
    inputs = rows | {"q": rows["q"][:, :T], "g": rows["g"][:, :T]}
    inputs |= {name: x.unflatten(1, (T, R)) for name, x in rows.items() if name in ("k", "v", "beta")}

    def plain(x):
        beta = x["beta"][..., None] if "beta" in x else None
        k, v = x["k"].transpose(2, 3), x["v"].transpose(2, 3)
        u, e = (v, None) if beta is None else (y * beta.transpose(2, 3) for y in (v, k))
        return delta_fwd(x["q"], k, u, e, x["g"], x["initial_state"], None, scale, RULES[rule][1], 8)

    assert_same(engine(rule, R=R), plain, inputs, f"{rule}, R = {R}")


@pytest.mark.parametrize(
    "style, dtype", covering(["strong", "identical", "clustered"], [torch.float16, torch.float32], pairs=False)
)
def test_outputs_keep_the_error_budget(style, dtype):
    """Twice the definition's own error at this dtype (tests of gradients: the backward's)."""
    kept, wide, single = stored(sample("kda", B=8, T=64, style=style, V=16), dtype, ("q", "k", "v"))
    settings = {"scale": 0.3, "output_final_state": True, "operand": operand(dtype)}
    runs = engine("kda")(kept), definition("kda")(wide), recurrent_delta(**single, **settings), literal(**single, **settings)
    assert_within_budget(over_budget(*(dict(zip(("o", "state"), run, strict=True)) for run in runs), heads={"o": 2}))


def test_gates_of_minus_ten_thousand_reset_and_stay_finite():
    inputs = sample("kda", T=37)
    inputs["g"][:, ::5] = -1e4
    assert_same(engine("kda"), definition("kda"), inputs, "-1e4")
    half = {name: x.to(torch.float16 if name in ("q", "k", "v") else torch.float32) for name, x in inputs.items()}
    for ours, theirs in zip(engine("kda")(half), definition("kda")(inputs), strict=True):
        assert relative(ours, theirs) < 2e-3


@pytest.mark.parametrize("rule, packed", covering(["gla", "kda", "gdn2"], [True, False], pairs=False))
def test_the_operator_is_what_the_compiler_thinks(rule, packed):
    from needlework.ops.delta.channel.op import delta_channel, delta_channel_fwd

    x = sample(rule, T=19, N=2 if packed else None)
    tensors = DeltaInputs(*(x.get(name) for name in DeltaInputs._fields))
    cu_seqlens = torch.tensor([0, 5, 19]) if packed else None
    for operator in (delta_channel, delta_channel_fwd):
        torch.library.opcheck(
            operator, (*tensors, cu_seqlens, 0.3, RULES[rule][1], 1), test_utils=("test_schema", "test_faketensor")
        )


def test_every_launch_config_names_its_launches():
    from needlework.ops.delta.channel import intra, scan

    for config in launch_configs.rows("delta/channel"):
        for module in (intra, scan):
            for case in module.compile_cases(config, torch.bfloat16, 128, 128):
                assert set(case.kernel.arg_names) == {*case.signature, *case.constexprs}, f"{config.name}: {case.kernel}"
