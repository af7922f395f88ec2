"""The papers' sizes, exactly: spec/experiments.md and spec/polar.md (counts), spec/carve.md (the write gate)."""

import dataclasses
import math

import pytest
import torch

from needlework.layers import Delta, RetentionGate
from needlework.models import NeedleworkForCausalLM
from needlework.models.presets import PRESETS, atma, count_parameters, mamba3_mixer, preset

COUNTS = {
    "atma-nope": 369_717_376, "atma-polar": 369_758_464, "atma-polar-memory": 378_220_864,
    "atma-nope-memory": 378_179_776, "atma-rope": 369_692_800, "atma-rope-memory": 378_155_200,
    "qdelta-340m": 380_017_148, "qdelta-1.3b": 1_387_606_780,
    "ccq-gdn-500m": 479_633_274, "ccq-gdn-1.3b": 1_322_070_906, "gdn-500m": 479_504_124, "gdn-1.3b": 1_321_812_732,
    "ccq-gla-500m": 479_751_294, "ccq-gla-1.3b": 1_322_274_942,
    "transformer-500m": 482_417_664, "transformer-1.3b": 1_298_761_728,
    **{f"{name}-1b": 1_113_024_512 for name in ("standard", "lucid")}, "lucid-1b-beta": 1_113_204_736,
    **{f"{name}-1b-64": 1_100_048_384 for name in ("standard", "lucid")}, "lucid-1b-64-beta": 1_100_048_384 + 180_224,
    **{f"lucid-1b-{p}": 1_113_024_512 for p in ("qk", "rowmax")},
    **{f"lucid-1b-64-{p}": 1_100_048_384 for p in ("qk", "rowmax")}, "lucid-256k": 1_195_444_224,
    "path-1b": 1_111_763_032, "lucid-path-1b": 1_111_763_032, "path-1b-rank32": 1_101_867_608,
    "gla-hedgehog-500m": 482_385_408, "gla-hedgehog-1.3b": 1_324_780_032,
    "mamba2-500m": 461_837_664, "mamba2-1.3b": 1_306_303_488,
    "mamba2-340m-untied": 382_387_712, "mamba2-1.3b-untied": 1_371_839_488,
    "mamba-340m": 385_565_696, "mamba-1.3b": 1_400_276_992,
    "retnet-340m": 380_165_120, "retnet-1.3b": 1_351_727_104,
    "deltanet-340m": 374_362_112, "deltanet-1.3b": 1_365_286_912,
    "gdn2-1.3b": 1_450_096_416, "gdn2-1.3b-swa": 1_447_772_688,
    "carve-125m": 112_043_520, "carve-1.3b": 1_325_011_968,
    "mamba3-1.3b": 18 * (33_030_544 + 3 * 2304 * 5696 + 2 * 2304) + 2 * 32_000 * 2304 + 2304,
    "mamba3-mimo-1.3b": 18 * (34_910_608 + 3 * 2304 * 5440 + 2 * 2304) + 2 * 32_000 * 2304 + 2304,
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


@pytest.mark.parametrize(("size", "layer", "wider"), [("500m", 6_601_056, 478_960_224), ("1.3b", 25_849_280, 1_331_530_752)])
def test_a_mamba_2_layer_has_its_parameters_and_a_wider_state_too(size, layer, wider):
    """spec/baselines.md: the block's norm included; N 256 beside N 128."""
    config = preset(f"mamba2-{size}")
    assert numbers(meta(config).model.blocks[0]) == layer
    mixer = dataclasses.replace(config.mixer("M"), key_dim=256)
    assert count_parameters(config.replaced(mixers={"M": mixer.to_dict()})) == wider


@pytest.mark.parametrize(("name", "without"), [("gdn2-1.3b", 1_302_638_112), ("gdn2-1.3b-swa", 1_300_314_384)])
def test_gdn_2_has_its_published_count_without_embeddings_and_last_norm(name, without):
    assert numbers(meta(preset(name)).model.blocks) == without


def test_carve_s_write_gate_is_9216_parameters_a_layer():
    mixer = preset("carve-125m").mixer("M").build(768)
    assert sum(p.numel() for p in mixer.write.w.parameters()) == 9_216


def meta(config) -> NeedleworkForCausalLM:
    with torch.device("meta"):
        return NeedleworkForCausalLM(config)


def numbers(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("dim", "rank", "count", "state"),
    [
        (2048, 1, 26_165_632, 4 * 64 * (128 * 64 + 128 + 64 + 32)),
        (2048, 4, 27_836_800, 4 * 64 * (128 * 64 + 4 * 128 + 64 + 32)),
        (2304, 1, 33_030_544, 4 * 72 * (128 * 64 + 128 + 64 + 32)),
        (2304, 4, 34_910_608, 4 * 72 * (128 * 64 + 4 * 128 + 64 + 32)),
    ],
)
def test_a_mamba3_mixer_has_its_pages_parameters_and_state(dim, rank, count, state):
    """spec/baselines.md, "Sizes" and "Mamba-3": 4 H (N P + R N + P + m) bytes, 2.06 MiB at D 2048."""
    with torch.device("meta"):
        mixer = mamba3_mixer(dim, rank).build(dim)
    assert numbers(mixer) == count
    assert mixer.state_size(1000, torch.bfloat16) == state


def test_at_18_layers_of_2304_mamba3_has_gdn2_s_size():
    """spec/baselines.md: 1,302,638,112 without embeddings and last norm."""
    for name in ("mamba3-1.3b", "mamba3-mimo-1.3b"):
        assert abs(COUNTS[name] - 2 * 32_000 * 2304 - 2304 - 1_302_638_112) < 0.003 * 1_302_638_112


def test_atma_is_composed_as_its_table_says():
    """spec/polar.md, "Exact composition"."""
    model = meta(preset("atma-polar-memory"))
    conv, attention = model.model.blocks[0], model.model.blocks[2].mixer
    assert numbers(model.model.embed) == 51_511_296
    assert numbers(model.lm_head) == 51_561_600
    assert sum(numbers(m) for m in model.modules() if type(m).__name__ == "RMSNorm") == 33 * 1_024
    assert numbers(conv.mlp) == 12_592_128
    assert numbers(conv.mixer) == 4_201_472
    assert sum(numbers(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)) == 3_673_600
    assert numbers(attention.conv) == 6_144
    assert numbers(attention.attend) == 10_272 and numbers(attention.attend.mag_proj) == 9_216
    assert numbers(attention.memory) == 2_115_600
    assert [hasattr(block.mixer, "attend") for block in model.model.blocks] == [i % 4 == 2 for i in range(16)]


def test_atmas_memory_holds_512_kib_a_layer_and_its_pages_a_key_and_a_value():
    """spec/polar.md, "State": k, v 2·Hkv·d·n, the last 3 q, k, v, memory [Hq d d] float32, n; a convolution its last 2 inputs."""
    model = meta(preset("atma-polar-memory")).model
    attention, half, n = model.blocks[2].mixer, torch.bfloat16, 1_000
    assert sum(part.nbytes for part in attention.memory.held(half).values()) == 512 * 1024
    pages, count, convolution = 2 * 2 * 128 * n * 2, 8, 3 * (8 + 2 + 2) * 128 * 2
    assert attention.state_size(n, half) == pages + count + convolution + 512 * 1024
    assert model.blocks[0].mixer.state_size(n, half) == 2 * 1024 * 2


@pytest.mark.parametrize(("size", "layer", "mixer"), [("340m", 14_975_244, 6_322_444), ("1.3b", 59_834_892, 25_227_788)])
def test_a_qdelta_layer_has_its_pages_parameters_and_no_bias(size, layer, mixer):
    """spec/qdelta.md, "Sizes"."""
    model = meta(preset(f"qdelta-{size}"))
    block = model.model.blocks[0]
    assert numbers(block) == layer and numbers(block.mixer) == mixer
    assert not any(name.endswith(".bias") for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("size", "full", "saved", "saved_full"), [("125m", 123_840_000, 18.4, 14), ("1.3b", 1_501_172_736, 18.9, 14)]
)
def test_carves_bottleneck_and_scalar_write_gate_save_what_their_page_says(size, full, saved, saved_full):
    """spec/carve.md, spec/experiments.md: −18.4 % and −18.9 % of the mixer against a write gate of D·H·V, −14 % at full rank f, b_x."""
    config = preset(f"carve-{size}")
    D, layers = config.hidden_size, len(config.layout)
    mixer = config.mixer("M")
    H, K, V = mixer.heads, mixer.key_dim, mixer.value_dim
    ours = numbers(meta(config).model.blocks[0].mixer)
    full_rank = ours + 2 * (D * H * K - D * V - V * H * K)
    matrix_gate = D * H * V - D * H
    assert count_parameters(config) + layers * (full_rank - ours) == full
    assert round(100 * matrix_gate / (ours + matrix_gate), 1) == saved
    assert round(100 * matrix_gate / (full_rank + matrix_gate)) == saved_full
    if size == "125m":
        assert D * H * V == 589_824


def small_atma(**settings) -> NeedleworkForCausalLM:
    """ATMA's preset in two layers of width 64."""
    config = atma("polar", True, **settings)
    a = dataclasses.replace(config.mixer("a"), heads=4, kv_heads=2, head_dim=16)
    mixers = {"c": config.mixer("c").to_dict(), "a": a.to_dict()}
    torch.manual_seed(0)
    return NeedleworkForCausalLM(config.replaced(vocab_size=61, hidden_size=64, layout="ca", mixers=mixers))


def alive(model: NeedleworkForCausalLM, steps: int) -> list[set[str]]:
    """After each step of gradient descent: which parameters of the convolution layer had a gradient."""
    found, mixer = [], model.model.blocks[0].mixer
    for step in range(steps):
        tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(tokens[:, :-1], targets=tokens[:, 1:]).cross_entropy.backward()
        found.append({name for name, p in mixer.named_parameters() if p.grad is not None and p.grad.any()})
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    return found


def test_the_convolutions_live_from_the_third_step():
    """Step 0 moves the unembedding, which starts at zero; step 1 out_proj, through it; step 2 in_proj and the kernel, through both."""
    out = {"out_proj.weight", "out_proj.bias"}
    assert alive(small_atma(), 4) == [set(), out, *[out | {"in_proj.weight", "in_proj.bias", "conv.weight"}] * 2]


def test_the_published_convolutions_are_dead_for_ever():
    """spec/polar.md: every gradient but the output bias's is exactly zero, and so at every step after."""
    model = small_atma(published=True)
    assert alive(model, 6) == [set(), *[{"out_proj.bias"}] * 5]
    mixer = model.model.blocks[0].mixer
    assert not any(p.any() for p in (*mixer.in_proj.parameters(), mixer.out_proj.weight)) and mixer.conv.weight.all()


def test_one_head_of_a_trained_model_takes_a_bound_when_it_is_loaded(tmp_path):
    """spec/polar.md: one layer-head capped at a half-life, at evaluation only, no retraining."""
    model = small_atma().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    gate = RetentionGate(bound=(None, 2.0, None, None))
    a = model.config.mixer("a")
    bounded = dataclasses.replace(a, memory=dataclasses.replace(a.memory, write=Delta(gate=gate)))
    config = model.config.with_mixer(1, bounded)
    assert config.layout[0] == "c" and model.config.layout == "ca" and config.mixer(config.layout[1]) == bounded
    again, info = NeedleworkForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    tokens = torch.arange(20)[None]
    gates = [m.model.blocks[1].mixer.memory.write.gate for m in (model, again)]
    with torch.no_grad():
        assert not torch.equal(model(tokens).logits, again.eval()(tokens).logits)
        free, capped = (gate(torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))) for gate in gates)
    assert (
        torch.equal(free[..., [0, 2, 3]], capped[..., [0, 2, 3]])
        and capped[..., 1].max() <= -math.log(2) / 2 < free[..., 1].max()
    )


def test_a_window_and_the_published_switches_change_no_parameter():
    for kind in ("polar", "nope", "rope"):
        changed = atma(kind, True, window=1024, published=True)
        assert changed.mixer("a").attend.window == 1024
        assert count_parameters(changed) == COUNTS[f"atma-{kind}-memory"]


def test_the_zero_starts_are_the_published_ones_but_the_convolutions_live():
    """spec/polar.md, "Start": MLP proj, conv out_proj, W_o, W_μ, W_mem and the unembedding are 0, weight and bias; embedding N(0, 1)."""
    model = small_atma()
    zero = {name.rsplit(".", 1)[0] for name, p in model.named_parameters() if not p.any()}
    blocks = {
        "0.mixer.out_proj",
        "0.mlp.proj",
        "1.mixer.o_proj",
        "1.mixer.attend.mag_proj",
        "1.mixer.memory.mem_proj",
        "1.mlp.proj",
    }
    assert zero == {f"model.blocks.{name}" for name in blocks} | {"lm_head", "model.blocks.1.mixer.attend"}  # v_null
    embedding = model.model.embed.weight
    assert abs(embedding.std() - 1) < 4 / (2 * embedding.numel()) ** 0.5  # four standard errors
    with torch.no_grad():
        model.lm_head.weight.normal_()
    model(torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
    assert model.model.blocks[0].mixer.out_proj.weight.grad.any()


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'qdelta-340m'"):
        preset("qdelta-340")
