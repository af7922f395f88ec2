"""Looking inside a checkpoint, from the command line: what is on the page is what its rules have."""

import pytest
import torch

from needlework.data import byte_tokenizer, eot_id
from needlework.experiment.look import look
from needlework.layers import (
    CCQ,
    Attention,
    Carve,
    GatedConv,
    Linear,
    Lucid,
    LucidPath,
    Mamba3,
    Memory,
    Polar,
    QDelta,
    Recurrent,
    Softmax,
    SwiGLU,
)
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, save_checkpoint

HEADS = {"heads": 2, "key_dim": 8, "value_dim": 8}
MIXERS = {
    "Q": Recurrent(**HEADS, write=QDelta(), read=CCQ()),
    "C": Recurrent(**HEADS, write=Carve(rank=4, content_chunk=8)),
    "L": Attention(heads=2, head_dim=8, attend=Lucid()),
    "H": Attention(heads=2, head_dim=8, attend=LucidPath()),
    "P": Attention(heads=2, head_dim=8, attend=Polar(window=70), memory=Memory()),
    "S": Attention(heads=2, head_dim=8, attend=Softmax()),
    "G": GatedConv(),
    "A": Recurrent(**HEADS, write=Linear()),
    "M": Mamba3(**HEADS),
}
TEXT = "".join(chr(33 + (7 * n * n + n) % 90) + (" " if n % 6 == 0 else "") for n in range(400))


@pytest.fixture
def checkpoint(tmp_path):
    def made(layout):
        torch.manual_seed(0)
        mixers = {letter: MIXERS[letter] for letter in layout}
        model = NeedleworkForCausalLM(NeedleworkConfig(hidden_size=16, layout=layout, mixers=mixers, mlp=SwiGLU(hidden=16)))
        save_checkpoint(model, byte_tokenizer(), eot_id(byte_tokenizer()), tmp_path / layout / "checkpoint")
        (tmp_path / "text.txt").write_text(TEXT)
        return tmp_path / layout / "checkpoint"

    return made


def test_every_rule_is_looked_at_in_the_layers_that_have_it(checkpoint, tmp_path):
    found = look(checkpoint("GQCLPQM"), tmp_path / "text.txt", 192)
    assert {rule: by_layer.layers for rule, by_layer in found.rules.items()} == {
        "qdelta": [1, 5], "ccq": [1, 5], "carve": [2], "lucid": [3], "polar": [4],
    }  # fmt: skip
    assert found.name == "GQCLPQM" and found.text == "192 tokens of text.txt"
    assert found.layers == ["gated_conv", "qdelta + ccq", "carve", "lucid", "polar + memory of delta", "qdelta + ccq", "mamba3"]
    assert found.norms.layers == [1, 2, 4, 5, 6] and list(found.norms.values) == ["16", "32", "64", "128", "192"]
    assert all(len(norms) == 5 and min(norms) > 0 for norms in found.norms.values.values())
    assert found.overwrite.layers == [1, 2, 4, 5] and found.chunks.layers == [2]
    assert [(one.layer, one.rule) for one in found.maps] == [
        (1, "qdelta"), (2, "carve"), (3, "lucid"), (4, "delta"), (4, "polar"), (5, "qdelta"),
    ]  # fmt: skip
    assert found.notes == [] and len(found.words) == 96


def test_a_page_has_lucid_and_lucid_path_by_their_layers(checkpoint, tmp_path):
    folder = checkpoint("LSH")
    by_layer = look(folder, tmp_path / "text.txt", 96).rules["lucid"]
    assert by_layer.layers == [0, 2] and [len(values) for values in by_layer.values.values()] == [2, 2]


def test_the_command_writes_the_page_of_what_there_is(checkpoint, tmp_path, needlework):
    said = needlework(
        "look", checkpoint("SA"), "--text", tmp_path / "text.txt", "--out", tmp_path / "page.html", "--tokens", 128
    )
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert said == f"page: {tmp_path / 'page.html'}\n" and "Inside SA" in page
    assert "Layer 0: what each token reads, softmax" in page and "Size of the state" in page
    assert "Q-Delta" not in page and "overwrite" not in page and "The numbers" not in page


def test_what_a_diagnosis_refuses_is_a_note_with_its_reason(checkpoint, tmp_path):
    folder = checkpoint("Q")
    (tmp_path / "text.txt").write_text(" The locker number of amber-lantern is 4815162." * 9)
    found = look(folder, tmp_path / "text.txt")
    assert found.notes == ["ccq: not looked at: needle: a row has no needle token whose id occurs at most twice"]
    assert {*found.rules} == {"qdelta"}


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"a" * 63, "text.txt: 63 tokens, expected at least 64"), (b"\xff" * 99, "text.txt: expected text in UTF-8")],
)
def test_a_file_that_is_no_text_of_some_length_is_refused(checkpoint, tmp_path, needlework, content, says):
    folder = checkpoint("S")
    (tmp_path / "text.txt").write_bytes(content)
    assert says in needlework("look", folder, "--text", tmp_path / "text.txt", ok=False)
    assert "nothing.txt" in needlework("look", folder, "--text", tmp_path / "nothing.txt", ok=False)
