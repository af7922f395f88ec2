"""The papers' sizes, exactly: spec/experiments.md and spec/polar.md (counts), spec/carve.md (the write gate)."""

import pytest

from needlework.models.presets import PRESETS, count_parameters, preset

COUNTS = {
    "atma-nope": 369_717_376, "atma-polar": 369_758_464, "atma-polar-memory": 378_220_864,
    "atma-nope-memory": 378_179_776, "atma-rope": 369_692_800, "atma-rope-memory": 378_155_200,
    "qdelta-340m": 380_017_148, "qdelta-1.3b": 1_387_606_780,
    "ccq-gdn-500m": 479_633_274, "ccq-gdn-1.3b": 1_322_070_906, "gdn-500m": 479_504_124, "gdn-1.3b": 1_321_812_732,
    "ccq-gla-500m": 479_751_294, "ccq-gla-1.3b": 1_322_274_942,
    "transformer-500m": 482_417_664, "transformer-1.3b": 1_298_761_728,
    "lucid-1b": 1_100_048_384, "lucid-1b-qk": 1_100_048_384, "lucid-1b-rowmax": 1_100_048_384,
    "lucid-1b-beta": 1_100_048_384 + 180_224, "standard-1b": 1_100_048_384, "lucid-256k": 1_195_444_224,
    "carve-125m": 112_043_520, "carve-1.3b": 1_325_011_968,
}  # fmt: skip
# no paper prints these: GLA is its CCQ twin without W_λ; the hybrid swaps every fourth CARVE layer for attention
UNPRINTED = {"gla-500m", "gla-1.3b", "carve-1.3b-swa"}


def test_every_preset_is_checked():
    assert set(COUNTS) | UNPRINTED == set(PRESETS)


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_its_paper_s_parameter_count(name):
    assert count_parameters(preset(name)) == COUNTS[name]


@pytest.mark.parametrize("size", ["500m", "1.3b"])
def test_ccq_adds_its_projection_and_bias_and_nothing_else(size):
    dim = preset(f"gla-{size}").hidden_size
    assert count_parameters(preset(f"ccq-gla-{size}")) - count_parameters(preset(f"gla-{size}")) == 21 * (6 * dim + 6)


def test_carve_s_write_gate_is_9216_parameters_a_layer():
    mixer = preset("carve-125m").mixer("M").build(768)
    assert sum(p.numel() for p in mixer.write.w.parameters()) == 9_216


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'qdelta-340m'"):
        preset("qdelta-340")
