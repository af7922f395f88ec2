"""flash-linear-attention's models as ours: by files that its own code made (peers.py), and by that code itself where it is installed."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from needlework.experiment.pretrained import load_model
from needlework.models.convert import Change, convert
from needlework.models.convert.described import Described
from needlework.models.convert.layouts import LAYOUTS
from tests.models import peers

# the bar for float32: both programs round, in another order
EQUAL = 1e-5


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(params=peers.MODELS)
def kind(request):
    return request.param


@pytest.fixture
def file(kind):
    return json.loads((peers.FOLDER / f"{kind}.json").read_text())


@pytest.fixture
def source(file, tmp_path):
    tensors = {name: peers.filled(name, shape) for name, shape in file["tensors"].items()}
    return written(tmp_path / "source", file["config"], tensors)


@torch.no_grad()
def ours(source, place):
    convert(source, place)
    return load_model(place).eval()(peers.tokens()).logits


def near(found, expected):
    return (found - expected).norm() <= EQUAL * expected.norm()


def test_ours_has_the_logits_that_its_own_code_wrote_down(file, source, tmp_path):
    assert near(ours(source, tmp_path / "ours")[0, list(peers.SHOWN)], torch.tensor(file["logits"]))


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="its kernels run in Triton's interpreter: TRITON_INTERPRET=1"
)
def test_ours_has_the_logits_of_its_own_code(kind, tmp_path):
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    theirs = peers.peer(kind)
    theirs.save_pretrained(tmp_path / "source")
    found, expected = ours(tmp_path / "source", tmp_path / "ours"), peers.logits(theirs)
    print(f"{kind}: most {(found - expected).abs().max():.2g}, relative {(found - expected).norm() / expected.norm():.2g}")
    assert near(found, expected)


def renamed(tensors, old, new):
    return {name.replace(old, new): x for name, x in tensors.items()}


def read(kind):
    """The config and the tensors of a file."""
    file = json.loads((peers.FOLDER / f"{kind}.json").read_text())
    return file["config"], {name: peers.filled(name, shape) for name, shape in file["tensors"].items()}


@pytest.mark.parametrize("kind", ["gla", "retnet"])
def test_the_norm_has_another_name_where_one_kernel_norms_and_gates(kind, tmp_path):
    config, tensors = read(kind)
    plain = ours(written(tmp_path / "plain", config, tensors), tmp_path / "ours")
    fused = written(tmp_path / "fused", config | {"fuse_norm": True}, renamed(tensors, "g_norm", "g_norm_swish_gate"))
    assert torch.equal(ours(fused, tmp_path / "too"), plain)


def test_retnets_convolution_is_none_whatever_its_file_says(tmp_path):
    """Its model does not hand the key to its layer, which then has no convolution."""
    config, tensors = read("retnet")
    plain = ours(written(tmp_path / "plain", config, tensors), tmp_path / "ours")
    assert torch.equal(ours(written(tmp_path / "said", config | {"use_short_conv": True}, tensors), tmp_path / "too"), plain)


@pytest.mark.parametrize("kind", peers.DELTA)
def test_strengths_are_doubled_where_the_file_says_so(kind):
    config, _ = read(kind)
    for said in (True, False):
        read_as = LAYOUTS[kind](Described(config | {"allow_neg_eigval": said}, "config.json")).config
        assert [mixer.write.allow_neg_eigval for mixer in read_as.each_layer()] == [said, said]


def test_mamba2_of_one_model_type_is_told_apart_by_a_key(tmp_path):
    config, tensors = read("mamba2_fla")
    assert config["model_type"] == "mamba2"
    assert convert(written(tmp_path / "source", config, tensors), tmp_path / "ours").layout == "mamba2_fla"


def changed(folder, **values):
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | values))


@pytest.mark.parametrize(
    ("kinds", "values"),
    [
        (("gla", "retnet", "delta_net", "gated_deltanet", "kda"), {"norm_eps": 1e-5}),
        (("gla", "retnet", "delta_net", "gated_deltanet", "kda"), {"attn": {"layers": [1], "num_heads": 2}}),
        (("gla", "retnet"), {"feature_map": "relu"}),
        (("gla", "retnet"), {"num_kv_heads": 1}),
        (("gla", "retnet"), {"elementwise_affine": False}),
        (("gla",), {"clamp_min": -2.0}),
        (("delta_net",), {"qk_norm": "sum"}),
        (("gated_deltanet",), {"output_gate_activation": "sigmoid"}),
        (("kda",), {"lower_bound": -5.0}),
        (("mamba2_fla",), {"norm_before_gate": True}),
        (("mamba2_fla",), {"rmsnorm": False}),
        (("mamba2_fla",), {"D_has_hdim": True}),
        (("mamba2_fla",), {"use_bias": True}),
        (("mamba2_fla",), {"dt_limit": [0.0, 0.5]}),
    ],
)
def test_what_no_layer_has_is_refused_by_its_key(kinds, values, tmp_path):
    (key,) = values
    for kind in kinds:
        config = json.loads((peers.FOLDER / f"{kind}.json").read_text())["config"]
        folder = written(tmp_path / kind, config | values, {"a": torch.ones(1)})
        with pytest.raises(ValueError, match=f"config.json: {key} is .*, which no layer of needlework has"):
            convert(folder, tmp_path / "ours")


def test_the_width_of_an_mlp_follows_from_its_ratio():
    config = json.loads((peers.FOLDER / "gla.json").read_text())["config"]
    for dim, ratio, hidden in ((2048, 4, 5632), (1024, 4, 2816), (1024, None, 2816), (96, 4, 256)):
        described = config | {"hidden_size": dim, "hidden_ratio": ratio, "intermediate_size": None}
        assert LAYOUTS["gla"](Described(described, "config.json")).config.channel_mixer().hidden == hidden


@pytest.mark.parametrize("kind", [kind for kind in peers.MODELS if not kind.endswith("negative") and "path" not in kind])
def test_ccq_reads_a_converted_recurrence(source, tmp_path, kind):
    """Its map and bias are new and start as its layer's; λ = 0 is the model as it was."""
    plain = ours(source, tmp_path / "ours")
    done = convert(source, tmp_path / "ccq", Change(read="ccq", layers=(1,)))
    assert done.new == ("model.blocks.1.mixer.read.bias", "model.blocks.1.mixer.read.project.weight")
    model = load_model(tmp_path / "ccq").eval()
    read = model.model.blocks[1].mixer.read
    assert torch.sigmoid(read.bias).allclose(torch.tensor(0.1))
    with torch.no_grad():
        assert not near(model(peers.tokens()).logits, plain)
        read.project.weight.zero_(), read.bias.fill_(-1e4)
        assert near(model(peers.tokens()).logits, plain)
    with pytest.raises(
        ValueError, match=r"attend: layer 0 is 'recurrent'\. LUCID solves the values that softmax attention reads"
    ):
        convert(source, tmp_path / "no", Change(attend="lucid", layers=(0,)))
    shutil.rmtree(tmp_path / "ours")
