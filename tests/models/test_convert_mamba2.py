"""Mamba-2 by transformers' own code on a CPU, and the same tensors in its authors' layout."""

import json

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from needlework.experiment.pretrained import load_model
from needlework.models.convert import convert
from needlework.models.convert.described import Described
from needlework.models.convert.layouts import LAYOUTS
from needlework.models.presets import count_parameters

VOCABULARY = 64
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, chunk_size=16,
    time_step_limit=(0.0, float("inf")), pad_token_id=0,
)  # fmt: skip
MODELS = {
    "one group, tied": Mamba2Config(**SMALL, n_groups=1, tie_word_embeddings=True),
    "two groups": Mamba2Config(**SMALL, n_groups=2, use_conv_bias=False, layer_norm_epsilon=1e-3, conv_kernel=3),
}
THEIRS = dict(  # published, for the tensors of "one group, tied"
    d_model=32, d_intermediate=0, n_layer=2, vocab_size=61, attn_layer_idx=[], attn_cfg={}, rms_norm=True, residual_in_fp32=True,
    fused_add_norm=True, pad_vocab_size_multiple=16, tie_embeddings=True,
    ssm_cfg={"layer": "Mamba2", "headdim": 16, "d_state": 8, "chunk_size": 64},
)  # fmt: skip

PUBLISHED = dict(d_model=768, n_layer=24, vocab_size=50_277, ssm_cfg={"layer": "Mamba2"})


def peer(name):
    """transformers' model; norms away from 1, biases and D from their starts, steps near softplus(−3)."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(MODELS[name]).eval()
    with torch.no_grad():
        for leaf, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p))
            if leaf.endswith("dt_bias"):
                p.copy_(torch.randn_like(p) - 3)
    return model


@torch.no_grad()
def logits(model):
    return model(torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1)), use_cache=False).logits


def ours(source, place):
    done = convert(source, place)
    return done, load_model(place).eval()


@pytest.mark.parametrize("name", MODELS)
def test_ours_has_the_logits_of_transformers_mamba2(name, tmp_path):
    theirs = peer(name)
    theirs.save_pretrained(tmp_path / "source")
    done, model = ours(tmp_path / "source", tmp_path / "ours")
    assert (logits(model) - logits(theirs)).abs().max() <= 1e-5
    assert done.layout == "mamba2" and done.parameters == theirs.num_parameters() and not done.new


def authors(folder, **values):
    """The model in the layout of state-spaces."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(THEIRS | values))
    state = {name.replace("embeddings.", "embedding."): x for name, x in peer("one group, tied").state_dict().items()}
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def test_the_authors_layout_is_the_same_model(tmp_path):
    done, model = ours(authors(tmp_path / "source"), tmp_path / "ours")
    assert (logits(model) - logits(peer("one group, tied"))).abs().max() <= 1e-5
    assert done.layout == "state_spaces" and model.config.vocab_size == VOCABULARY and model.config.eos_token_id is None


def test_the_authors_130m_has_its_size():
    """A published config, where every size of the layer is the default: D 768, I 1536, N 128, 24 heads, a vocabulary of 50,288 rows."""
    ours = LAYOUTS["state_spaces"](Described(THEIRS | PUBLISHED, "config.json")).config
    layer = (2 * 1536 + 2 * 128 + 24) * 768 + (1536 + 2 * 128) * 5 + 3 * 24 + 1536 + 1536 * 768 + 768
    assert count_parameters(ours) == 50_288 * 768 + 24 * layer + 768 == 128_989_632


def ssm(**values):
    return {"ssm_cfg": THEIRS["ssm_cfg"] | values}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rms_norm": False}, "config.json: rms_norm is False, which no layer"),
        ({"d_intermediate": 48}, "config.json: d_intermediate is 48, which no layer"),
        ({"attn_layer_idx": [1]}, r"config.json: attn_layer_idx is \[1\], which no layer"),
        ({"ssm_cfg": {}}, "config.json: ssm_cfg: layer is missing"),
        (ssm(layer="Mamba1"), "ssm_cfg: layer is 'Mamba1', which no layer of needlework has; expected 'Mamba2'"),
        (ssm(d_ssm=32), "ssm_cfg: d_ssm is 32, which no layer of needlework has; expected None or 64"),
        (ssm(dt_limit=[0.0, 0.1]), r"ssm_cfg: dt_limit is \[0\.0, 0\.1\], which no layer"),
        (ssm(ngroups=3), "ssm_cfg: ngroups is 3, expected a divisor of its 4 heads"),
        (ssm(norm_before_gate=True), "ssm_cfg: norm_before_gate is True, which no layer"),
        (ssm(rmsnorm=False), "ssm_cfg: rmsnorm is False, which no layer"),
        (ssm(D_has_hdim=True), "ssm_cfg: D_has_hdim is True, which no layer"),
        (ssm(bias=True), "ssm_cfg: bias is True, which no layer"),
        (ssm(d_inner=7), "ssm_cfg: unknown key 'd_inner'"),
        (ssm(d_state=9), r"in_proj\.weight has the shape \[148, 32\], expected 150 rows of its config: 64 of z, 64 of x, 9 of B, 9 of C, 4 of dt"),
    ],
)  # fmt: skip
def test_what_no_layer_has_is_refused_in_the_authors_layout(values, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        convert(authors(tmp_path / "source", **values), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit is .*0\.1.*, which no layer"),
        ({"use_bias": True}, "use_bias is True, which no layer"),
        ({"rms_norm": False}, "rms_norm is False, which no layer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which no layer"),
        ({"n_groups": 3}, "n_groups is 3, expected a divisor of its 4 heads"),
        ({"groups": 3}, "unknown key 'groups'"),
        ({"num_hidden_layers": 3}, r"layers\.2\.norm\.weight is missing, which"),
    ],
)  # fmt: skip
def test_what_no_layer_has_is_refused_in_transformers_layout(values, says, tmp_path):
    peer("one group, tied").save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(ValueError, match=says):
        convert(tmp_path / "source", tmp_path / "ours")


def test_what_transformers_does_not_read_is_not_asked_for(tmp_path):
    """Codestral's file: its code gates before the norm all the same."""
    theirs = peer("one group, tied")
    theirs.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    of_theirs = {"norm_before_gate": True, "rms_norm": True, "time_step_scale": 1.0, "time_step_init_scheme": "random"}
    file.write_text(json.dumps(json.loads(file.read_text()) | of_theirs | {"intermediate_size": 64}))
    again = Mamba2ForCausalLM.from_pretrained(tmp_path / "source").eval()
    assert torch.equal(logits(again), logits(theirs))
    assert (logits(ours(tmp_path / "source", tmp_path / "ours")[1]) - logits(theirs)).abs().max() <= 1e-5
