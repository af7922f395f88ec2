"""The catalog's mixers by one line: `build(name, dim, heads=)`."""

import pytest
import torch

import needlework.layers as layers
from needlework.layers import CATALOG, CCQ, KINDS, Attention, Recurrent, Rope, build
from needlework.layers.config import Config


@pytest.mark.parametrize("name", CATALOG)
def test_one_line_makes_a_mixer_of_its_width(name):
    mixer, x = build(name, dim=32, heads=2), torch.randn(2, 9, 32)
    y, state = mixer(x)
    assert y.shape == x.shape and state is None
    _, state = mixer(x[:, :5], output_final_state=True)
    rest, _ = mixer(x[:, 5:], state)
    torch.testing.assert_close(rest, y[:, 5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CATALOG)
def test_the_built_mixer_is_the_catalogs(name):
    sizes = layers.catalog.Sizes(heads=2, key_dim=16, value_dim=16, attention_heads=2, kv_heads=2, head_dim=16)
    assert build(name, 32, heads=2).config == CATALOG[name].make(sizes)


def test_the_baselines_have_the_parts_of_their_papers_layers():
    """spec/baselines.md: which of them convolve, what gates and norms their output, how they turn."""
    made = {name: build(name, 32, heads=2).config for name in CATALOG}
    assert {name for name, c in made.items() if isinstance(c, Recurrent) and c.conv is None} == {
        "gla", "retnet", "hedgehog", "gla-hedgehog", "rwkv7",
    }  # fmt: skip
    gates = {name: made[name].output_gate for name in ("deltanet", "gated-deltanet", "kda", "gdn2")}
    assert gates == {
        "deltanet": False, "gated-deltanet": True, "kda": layers.OutputGate(), "gdn2": layers.OutputGate(activation="silu"),
    }  # fmt: skip
    assert (made["mamba2"].conv, made["mamba2"].norm) == (layers.ShortConv(bias=True), layers.GatedNorm())
    assert (made["retnet"].position, made["retnet"].norm) == (layers.PairRope(), layers.HeadNorm(weight=False))
    maps = {name: (made[name].write.features.map, made[name].write.normalise) for name in ("hedgehog", "gla-hedgehog")}
    assert maps == {"hedgehog": ("halves", True), "gla-hedgehog": ("joint", False)}
    assert [made[name].pairs for name in ("mamba3", "mamba3-mimo")] == ["even", "halves"]


def test_a_field_goes_to_the_mixer_its_rule_or_its_read():
    assert build("lucid", 32, heads=4, kv_heads=2, window=8, position=Rope()).config == Attention(
        heads=4, kv_heads=2, head_dim=8, attend=layers.Lucid(window=8, scale=2 / 8**0.5), position=Rope(), qk_norm=True,
        conv=layers.Canon(),
    )  # fmt: skip
    qdelta = build("qdelta", 32, heads=4, value_dim=16, lam=0.5, conv=None, read=CCQ()).config
    assert qdelta == Recurrent(
        heads=4, key_dim=8, value_dim=16, write=layers.QDelta(lam=0.5, gate=layers.ScalarGate()), conv=None, read=CCQ()
    )
    assert build("ccq", 32, heads=4, start=0.3).config.read == CCQ(start=0.3)
    assert build("kda", 32, heads=4, read=CCQ(aligned=True), start=0.3).config.read == CCQ(aligned=True, start=0.3)


def test_attentions_scale_follows_its_head_dim():
    assert build("softmax", 32, heads=2, head_dim=64).config.attend.scale == 2 / 8


def test_layer_reaches_the_module():
    starts = [float(build("differential", 32, heads=2, layer=layer).attend.start) for layer in (0, 3)]
    assert starts[0] == pytest.approx(0.2) and starts[1] > 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (dict(name="qdleta", dim=32, heads=2), r"unknown mixer 'qdleta' \(did you mean 'qdelta'\?\); known: linear, gla, .*atma"),
        (dict(name="qdelta", dim=32, heads=2, lamb=1.0), r"qdelta: unknown field 'lamb' \(did you mean 'lam'\?\); known: conv, heads, .*lam"),
        (dict(name="softmax", dim=32, heads=2, key_dim=8), r"softmax: unknown field 'key_dim'.*head_dim"),
        (dict(name="qdelta", dim=32, heads=2, lam=-1.0), r"qdelta: lam is -1.0, expected a number >= 0"),
        (dict(name="qdelta", dim=32, heads=0), r"qdelta: heads is 0, expected a whole number >= 1"),
        (dict(name="qdelta", dim=33, heads=2), r"qdelta: dim is 33, expected a multiple of heads = 2"),
        (dict(name="softmax", dim=32, heads=2, head_dim="8"), r"softmax: head_dim is '8', expected a whole number >= 1"),
        (dict(name="softmax", dim=8, heads=16), r"softmax: dim is 8, expected a multiple of heads = 16"),
        (dict(name="qdelta", dim=33, heads=2, key_dim=8), r"qdelta: dim is 33, .* or the size of each head"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_there_is(call, message):
    with pytest.raises(ValueError, match=message):
        build(**call)


def test_sizes_of_heads_free_the_width():
    assert build("qdelta", 33, heads=2, key_dim=8, value_dim=8)(torch.randn(1, 3, 33))[0].shape == (1, 3, 33)
    assert build("polar", 33, heads=2, head_dim=8)(torch.randn(1, 3, 33))[0].shape == (1, 3, 33)


def test_every_public_class_says_what_it_is():
    public = [x for x in vars(layers).values() if isinstance(x, type) and issubclass(x, Config)]
    assert {*KINDS} <= {*public}
    assert not [c.__name__ for c in public if not (c.__doc__ or "").strip() or c.__doc__.startswith(f"{c.__name__}(")]
