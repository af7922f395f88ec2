"""A suite's result on the disk: whole, kept cell by cell, never over another measurement; any causal model of transformers is read."""

import json
from pathlib import Path

import pytest
import torch

from needlework.data import byte_tokenizer, eot_id
from needlework.eval.suites.number import Unavailable, number
from needlework.eval.suites.suite import Cell, Item, Mean, Suite
from needlework.experiment import suites
from needlework.experiment.suites import NothingMeasured, measure, subject_of, title_of
from needlework.layers import Attention, QDelta, Recurrent, Softmax
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, save_checkpoint
from needlework.models.checkpoint import write_tokenizer

MIXERS = {
    "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()),
    "W": Attention(heads=2, head_dim=8, attend=Softmax(window=8)),
}
MEASURED = []


class Counted(Item):
    """Two documents at a length; `lost` cannot be had, `stops` is interrupted once."""

    def measure(self, subject, length):
        MEASURED.append(f"{self.task}@{length}")
        if self.task == "lost":
            raise Unavailable("its data is gone")
        if self.task == "stops" and MEASURED.count(f"stops@{length}") == 1:
            raise KeyboardInterrupt
        return Cell(metrics={"m": number([0.0, length])})


def suite(*tasks):
    items = tuple(Counted(task=task, metrics=("m",)) for task in tasks)
    return Suite(
        name="s",
        title="t",
        source="p",
        items=items,
        lengths=(2,),
        means=(Mean(name="mean", of=tuple((t, "m") for t in tasks)),),
        needs=(),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of ours with a window, of a Llama and of a GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = NeedleworkForCausalLM(NeedleworkConfig(hidden_size=16, layout="QW", mixers=MIXERS, mlp=None, initializer_range=0.4))
    (place / "ours").mkdir()
    save_checkpoint(model, byte_tokenizer(), eot_id(byte_tokenizer()), place / "ours" / "checkpoint")
    small = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
    llama = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, **small
    )
    for name, other in (
        ("llama", LlamaForCausalLM(llama)),
        ("gpt2", GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=16, n_layer=1, n_head=2, **small))),
    ):
        other.save_pretrained(place / name)
        write_tokenizer(byte_tokenizer(), "<|eot|>", place / name)
    return place


@pytest.fixture
def ours(folder):
    MEASURED.clear()
    return str(folder / "ours" / "checkpoint")


def folder_of(source):
    return Path(source).parents[1].name


def of(source, **conditions):
    return subject_of(source, lambda tokenizer: None, **conditions)


def test_a_result_holds_the_numbers_and_all_that_they_depend_on(ours, tmp_path):
    path, result = measure(suite("one", "lost"), ours, of(ours), tmp_path)
    assert path.name == f"{folder_of(ours)}--ours.s.json" and json.loads(path.read_text()) == result
    assert result["cells"]["one@2"]["metrics"]["m"] == {"value": 1.0, "documents": [0.0, 2]}
    assert result["cells"]["lost@2"] == {"skipped": "its data is gone"}
    assert result["means"]["mean@2"] == {"value": None, "missing": ["lost@2"], "of": [["one", "m"], ["lost", "m"]]}
    assert result["of"].keys() == {
        "suite",
        "checkpoint",
        "full_context",
        "fixture",
        "limit",
        "autocast",
        "device",
        "code",
        "versions",
    }
    assert result["of"]["checkpoint"].keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert result["checkpoint"]["model_type"] == "needlework" and result["checkpoint"]["parameters"] > 0
    assert result["fixture"] is False and result["limit"] is None and result["seeds"]["lm_eval"]["numpy"] == 1234
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_stopped_measurement_goes_on_cell_by_cell(ours, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measure(suite("one", "stops"), ours, of(ours), tmp_path)
    assert [file.name.partition("-")[0] for file in tmp_path.iterdir()] == ["measuring"], "no half of a result"
    path, result = measure(suite("one", "stops"), ours, of(ours), tmp_path)
    assert MEASURED == ["one@2", "stops@2", "stops@2"] and result["means"]["mean@2"]["value"] == 1
    assert [*tmp_path.iterdir()] == [path]


def test_more_lengths_join_a_result_and_a_skipped_cell_is_tried_again(ours, tmp_path):
    measure(suite("one", "lost"), ours, of(ours), tmp_path)
    _, result = measure(suite("one", "lost"), ours, of(ours), tmp_path, lengths=(4, 2))
    assert MEASURED == ["one@2", "lost@2", "one@4", "lost@4", "lost@2"]
    assert result["cells"].keys() == {"one@2", "lost@2", "one@4", "lost@4"}


def test_another_measurement_is_not_overwritten(ours, tmp_path):
    path, _ = measure(suite("one"), ours, of(ours), tmp_path)
    before = path.read_text()
    with pytest.raises(ValueError, match=r"--ours\.s\.json is of another measurement \(limit differ\); remove it"):
        measure(suite("one"), ours, of(ours, limit=3), tmp_path)
    assert path.read_text() == before


def test_nothing_measured_is_an_error_and_no_file(ours, tmp_path):
    with pytest.raises(NothingMeasured, match="suite s: none of its tasks could be measured: its data is gone"):
        measure(suite("lost"), ours, of(ours), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_made_up_mirror_and_a_limit_mark_the_result(ours, tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "FIXTURE").touch()
    _, result = measure(suite("one"), ours, of(ours, data=tmp_path / "hub", limit=1), tmp_path / "to")
    assert result["fixture"] is True and result["limit"] == 1 and result["of"]["fixture"] is True


def test_any_causal_model_is_read_without_a_cache(folder, ours):
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    for source in (ours, *(str(folder / name) for name in ("llama", "gpt2"))):
        subject = of(source)
        with torch.no_grad():
            expected = subject.model(ids).logits
        assert torch.equal(subject.read(ids, 20), expected) and torch.equal(subject.read(ids, 3), expected[:, -3:])
        assert not subject.model.training and subject.tokenizer("a")["input_ids"] == [97]
        assert subject.positions == (64 if source.endswith("gpt2") else None)


def test_texts_of_our_own_tasks_are_never_padded(ours):
    subject = of(ours)
    subject.tokenizer(["a", "long text"], padding=True)
    assert [len(found.ids) for found in subject.words.encode_batch(["a", "long text"])] == [1, 9]


def test_a_model_without_the_choice_of_logits_is_read_whole(folder, monkeypatch):
    subject = of(str(folder / "llama"))
    forward = type(subject.model).forward
    monkeypatch.setattr(
        type(subject.model), "forward", lambda self, input_ids, use_cache: forward(self, input_ids, use_cache=use_cache)
    )
    ids = torch.arange(12)[None]
    from needlework.experiment.reader import any_reader

    assert torch.equal(any_reader(subject.model, None)(ids, 2), subject.model(ids, use_cache=False).logits[:, -2:])


def test_full_context_opens_the_windows_of_a_model_of_ours(folder, ours, tmp_path):
    windows = lambda subject: {mixer["attend"]["window"] for mixer in subject.model.config.mixers.values() if "attend" in mixer}
    opened = of(ours, full_context=True)
    assert windows(of(ours)) == {8} and windows(opened) == {None}
    path, result = measure(suite("one"), ours, opened, tmp_path, full_context=True)
    assert result["checkpoint"]["title"] == f"{folder_of(ours)}/ours (full context)"
    assert path.name == f"{folder_of(ours)}--ours (full context).s.json"
    with pytest.raises(ValueError, match=r"--full-context: .*llama is no model of needlework"):
        of(str(folder / "llama"), full_context=True)


def test_a_checkpoint_is_called_by_its_folder_or_its_name_on_the_hub(tmp_path):
    (tmp_path / "runs" / "demo" / "checkpoint").mkdir(parents=True)
    assert title_of(str(tmp_path / "runs" / "demo" / "checkpoint")) == title_of(str(tmp_path / "runs" / "demo")) == "runs/demo"
    assert title_of("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_what_is_no_model_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"--data {tmp_path / 'none'}: expected a folder of data sets"):
        of("x/y", data=tmp_path / "none")
    with pytest.raises(ValueError, match=f"{tmp_path}: AutoModelForCausalLM loads no model from there"):
        of(str(tmp_path))
    monkeypatch.setattr(suites, "load_causal", lambda source: pytest.fail("the Hub is asked"))
    (tmp_path / "config.json").write_text('{"model_type": "needlework"}')
    with pytest.raises(ValueError, match=r"expected a folder with config\.json and model\.safetensors"):
        of(str(tmp_path))
