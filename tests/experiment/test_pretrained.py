"""A checkpoint's folder: what is wrong with it is named."""

import json
import shutil

import pytest

from needlework.experiment.pretrained import INDEX, load_model
from needlework.models import NeedleworkForCausalLM
from needlework.recipes import demo


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = NeedleworkForCausalLM(demo.model("gated-deltanet"))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_what_was_saved_is_loaded(saved):
    model = NeedleworkForCausalLM(demo.model("gated-deltanet"))
    again = load_model(saved, model.config)
    assert again.state_dict().keys() == model.state_dict().keys() and load_model(saved).config.layout == "MM"


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def described(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "model.safetensors").unlink(), r"copy: expected a folder with config\.json and model\.safetensors"),
        (lambda f: (f / "config.json").unlink(), r"copy: expected a folder with config\.json"),
        (lambda f: cut(f / "config.json", 90), r"config\.json: torn"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: model_type is None, expected 'needlework'"),
        (lambda f: described(f, model_type="llama"), r"config\.json: model_type is 'llama', expected 'needlework'"),
        (lambda f: described(f, hiddensize=64), r"config\.json: config: unknown key 'hiddensize'"),
        (lambda f: described(f, hidden_size=128), r"copy holds another model \(mismatched keys: "),
        (
            lambda f: described(f, layout="MMM", num_hidden_layers=3, layer_types=None),
            r"copy holds another model \(missing keys: .*blocks\.2",
        ),
        (lambda f: cut(f / "model.safetensors", 5000), r"copy: model\.safetensors, or a part of it, is torn"),
        (lambda f: cut(f / "model.safetensors", 0), r"copy: model\.safetensors, or a part of it, is torn"),
        (lambda f: (f / INDEX).write_text('{"weight_map"'), r"model\.safetensors\.index\.json: torn"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named_in_one_line(folder, damage, says):
    damage(folder)
    with pytest.raises(ValueError, match=says) as refused:
        load_model(folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)
