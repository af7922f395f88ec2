"""Push and fetch through huggingface_hub's own client, against a hub on this machine (hub_stub.py)."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

import needlework
from needlework.data import byte_tokenizer, eot_id
from needlework.experiment.pretrained import load_model
from needlework.layers import Attention, QDelta, Recurrent, Rope, Softmax, SwiGLU
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, save_checkpoint
from needlework.models.hub import fetched
from needlework.report.card import FRONT, write_card
from tests.models import hub_stub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_stub.running() as running:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, running.url)  # made of it at import
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, for the Hub's storage alone
        monkeypatch.setenv("HF_TOKEN", "none-of-anyone")
        yield running


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    mixers = {
        "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()),
        "S": Attention(heads=2, head_dim=8, attend=Softmax(), position=Rope()),
    }
    model = NeedleworkForCausalLM(NeedleworkConfig(hidden_size=16, layout="QS", mixers=mixers, mlp=SwiGLU(hidden=24)))
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    save_checkpoint(model, byte_tokenizer(), eot_id(byte_tokenizer()), folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run" / "checkpoint")


def test_a_pushed_folder_is_the_hubs_to_the_byte_and_loads_from_there(hub, folder, needlework):
    said = needlework("push", folder, "someone/needle", "--licence", "apache-2.0")
    assert f"pushed: {hub.url}/someone/needle/commit/{hub.oid}" in said and hub.commits == 1
    local = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.repositories["someone/needle"] == local and {"README.md", "modeling_needlework.py"} <= local.keys()
    front = yaml.safe_load(FRONT.match(local["README.md"].decode())[1])
    assert front["license"] == "apache-2.0" and front["library_name"] == "transformers" and "qdelta" in front["tags"]
    again = fetched("someone/needle", ["*"])
    assert torch.equal(load_model(again).lm_head.weight, load_model(folder).lm_head.weight)


def test_a_card_of_ones_own_is_kept_but_for_its_licence(hub, folder, needlework):
    (folder / "README.md").write_text("---\nlicense: mit\ntags:\n- mine\n---\n# My words\n")
    needlework("push", folder, "someone/needle")
    assert hub.repositories["someone/needle"]["README.md"] == b"---\nlicense: mit\ntags:\n- mine\n---\n# My words\n"
    needlework("push", folder, "someone/needle", "--licence", "cc0-1.0")
    assert hub.repositories["someone/needle"]["README.md"] == b"---\ntags:\n- mine\nlicense: cc0-1.0\n---\n# My words\n"


def lose(hub, folder):
    hub.lost.add("config.json")


def alter(name):
    return lambda hub, folder: hub.changed.add(name)


@pytest.mark.parametrize(
    ("harm", "says", "commits"),
    [
        (lambda hub, folder: hub.refuses.add("repos/create"), "someone/needle: nothing was committed: HfHubHTTPError", 0),
        (lambda hub, folder: hub.refuses.add("/lfs/"), "someone/needle: nothing was committed: HfHubHTTPError", 0),
        (lambda hub, folder: hub.refuses.add("/commit/"), "someone/needle: nothing was committed: HfHubHTTPError", 0),
        (lambda hub, folder: hub.refuses.add("/tree/"), "committed as 0{39}1, but not confirmed: HfHubHTTPError", 1),
        (lose, r"commit 0{39}1 does not hold the folder's config\.json", 1),
        (alter("model.safetensors"), r"commit 0{39}1 does not hold the folder's model\.safetensors", 1),
        (alter("modeling_needlework.py"), r"commit 0{39}1 does not hold the folder's modeling_needlework\.py", 1),
        (
            lambda hub, folder: (folder / "config.json").unlink(),
            r"expected a folder with config\.json and model\.safetensors",
            0,
        ),
        (lambda hub, folder: (folder / "README.md").write_text("words"), "README.md: expected a card that begins with ---", 0),
    ],
)
def test_what_is_not_whole_on_the_hub_is_not_called_pushed(hub, folder, needlework, harm, says, commits):
    harm(hub, folder)
    said = needlework("push", folder, "someone/needle", "--licence", "mit", ok=False)
    assert "pushed:" not in said and hub.commits == commits
    assert re.search(says, said), said


def test_a_published_model_is_converted_by_its_name_on_the_hub(hub, tmp_path, needlework):
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "consolidated.pth").write_text("nobody needs it")
    hub.repositories["meta/tiny"] = {path.name: path.read_bytes() for path in (tmp_path / "llama").iterdir()}
    hub.commits = 7
    said = needlework("convert", "meta/tiny", tmp_path / "ours")
    assert "llama: 1 layers" in said and "no tokenizer in meta/tiny" in said
    assert load_model(tmp_path / "ours").config.hidden_size == 32
    assert not any("consolidated" in call for call in hub.calls)
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "base_model: meta/tiny" in card and "Converted by needlework from meta/tiny" in card
    with pytest.raises(OSError, match="meta/none: no folder here, and not to be had from the Hub: RepositoryNotFoundError"):
        fetched("meta/none", ["*"])


def test_a_card_without_a_run_beside_it_says_so(folder):
    write_card(folder)
    card = (folder / "README.md").read_text()
    assert "The training text is not recorded beside this folder." in card and "| mixer Q | recurrent + qdelta" in card


@pytest.mark.slow
def test_a_program_that_never_heard_of_needlework_loads_what_the_command_pushed(folder, tmp_path):
    code = """
        import sys, torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        assert not any(name.startswith("needlework") for name in sys.modules)
        model = AutoModelForCausalLM.from_pretrained("someone/needle", trust_remote_code=True).eval()
        tokenizer = AutoTokenizer.from_pretrained("someone/needle", trust_remote_code=True)
        print(model(tokenizer("abc", return_tensors="pt")["input_ids"]).logits.double().sum().item())
    """
    with hub_stub.running() as hub:
        own = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "none-of-anyone",
        }
        path = os.pathsep.join([str(Path(needlework.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        program = lambda *arguments: subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | own | {"PYTHONPATH": path},
            cwd=tmp_path,
        )
        pushed = program("-m", "needlework", "push", str(folder), "someone/needle", "--private")
        assert pushed.returncode == 0 and "pushed: " in pushed.stdout, pushed.stderr
        loaded = program("-c", textwrap.dedent(code))
    expected = load_model(folder).eval()(torch.tensor([list(b"abc")])).logits.double().sum().item()
    assert loaded.returncode == 0, loaded.stderr
    assert float(loaded.stdout) == pytest.approx(expected, rel=1e-6)
