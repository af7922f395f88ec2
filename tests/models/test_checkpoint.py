"""A checkpoint's folder describes itself: Auto classes, pipelines and programs that never heard of needlework load it."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from needlework.data import byte_tokenizer, eot_id, load_tokenizer
from needlework.data.bpe import train_tokenizer
from needlework.data.tokenizer import encode, is_byte_tokenizer
from needlework.layers import Attention, QDelta, Recurrent, Rope, Softmax, SwiGLU
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, checkpoint, save_checkpoint

MIXERS = {
    "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()),
    "S": Attention(heads=2, head_dim=8, attend=Softmax(window=5), position=Rope()),
}
TEXT = "def main():\n    return 'naïve ☃' # 123 ²\n"
TEXTS = (TEXT, " lead", "a b  c , don 't", "\x00\x7f", "", "x<|eot|>y")


def make(vocab_size=257, seed=0, **settings):
    torch.manual_seed(seed)
    return NeedleworkForCausalLM(
        NeedleworkConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            layout="QS",
            mixers=MIXERS,
            mlp=SwiGLU(hidden=24),
            initializer_range=0.3,
            **settings,
        )
    ).eval()


def bpe():
    return train_tokenizer([TEXT * 20], 280)


def beginning():
    """A tokenizer that puts its end of text before every text by itself, as Llama's does."""
    tokenizer = bpe()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|eot|> $A", special_tokens=[("<|eot|>", 0)])
    return tokenizer


def last():
    """One whose end of text has another name and is not the first token."""
    tokenizer = bpe()
    whole = json.loads(tokenizer.to_str().replace("<|eot|>", "</s>"))
    return type(tokenizer).from_str(json.dumps(whole))


@pytest.fixture
def saved(tmp_path):
    def save(tokenizer, model=None):
        folder = tmp_path / "checkpoint"
        save_checkpoint(model or make(tokenizer.get_vocab_size()), tokenizer, eot_id(tokenizer), str(folder))
        return folder

    return save


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, bpe, beginning, last])
def test_auto_tokenizer_gives_the_ids_that_the_model_was_trained_on(saved, make_tokenizer):
    tokenizer = make_tokenizer()
    theirs, ours = AutoTokenizer.from_pretrained(saved(tokenizer)), encode
    for text in TEXTS:
        ids = ours(tokenizer, text).tolist()
        assert theirs(text)["input_ids"] == ids == theirs.encode(text)
        assert theirs.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    end = eot_id(tokenizer)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (end, end, end)
    assert len(theirs) == tokenizer.get_vocab_size()
    batch = theirs(["ab", "a"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]] and batch["input_ids"][1, 1] == end


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, bpe, last])
def test_needleworks_own_tokenizer_comes_back_as_it_was(saved, make_tokenizer):
    tokenizer = make_tokenizer()
    again = load_tokenizer(saved(tokenizer))
    assert again.to_str() == tokenizer.to_str() and is_byte_tokenizer(again) == (make_tokenizer is byte_tokenizer)


def test_the_folder_says_where_texts_end_and_what_loads_it(saved):
    folder, model = saved(byte_tokenizer(), start := make()), make()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "modeling_needlework.py", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    for ids in (again.config, again.generation_config, AutoConfig.from_pretrained(folder), start.generation_config):
        assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (256, 256, 256)
    tokens = torch.randint(256, (2, 9))
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"] == (
        "modeling_needlework.NeedleworkForCausalLM"
    )


def test_the_config_that_a_recipe_holds_is_left_as_it_is(saved):
    model = make()
    config, before = model.config, model.config.to_dict()
    saved(byte_tokenizer(), model)
    assert config.to_dict() == before


def test_what_auto_map_says_is_of_the_folder_and_not_of_the_model(saved, tmp_path):
    loaded = AutoConfig.from_pretrained(saved(byte_tokenizer()))
    assert not hasattr(loaded, "auto_map") and "auto_map" not in loaded.to_dict()
    make().save_pretrained(tmp_path / "plain")  # as Trainer does
    assert "auto_map" in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (tmp_path / "plain" / "modeling_needlework.py").is_file()


def test_generation_ends_where_a_text_does(saved):
    model = make(tie_word_embeddings=False, head_bias=True)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.arange(257) == 256)  # the end of text is always the likeliest
    again = AutoModelForCausalLM.from_pretrained(saved(byte_tokenizer(), model)).eval()
    made = again.generate(torch.randint(256, (4, 5)), do_sample=False, max_new_tokens=6)
    assert made.shape == (4, 6) and (made[:, -1] == 256).all()


def test_a_pipeline_writes_a_batch_as_it_writes_each_text(saved):
    folder = saved(bpe())
    write = pipeline("text-generation", model=str(folder), device="cpu")
    prompts, settings = [TEXT, "def ", "x = 123"], {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    together = [made[0]["generated_text"] for made in write(prompts, batch_size=3, **settings)]
    assert together == [write(prompt, **settings)[0]["generated_text"] for prompt in prompts]
    model, tokenizer = make(280), bpe()
    ids = torch.tensor(encode(tokenizer, prompts[0]))[None]
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert together[0] == tokenizer.decode(ids[0, -5:].tolist())


def test_a_save_that_fails_leaves_what_was_there(saved, monkeypatch):
    folder = saved(byte_tokenizer(), make(seed=1))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_tokenizer", full)
    with pytest.raises(OSError, match="no space"):
        saved(byte_tokenizer(), make(seed=2))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    monkeypatch.undo()
    saved(byte_tokenizer(), make(seed=2))
    assert (folder / "model.safetensors").read_bytes() != files["model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_a_save_killed_between_its_renames_leaves_both_models(saved, monkeypatch):
    folder = saved(byte_tokenizer(), make(seed=1))
    before, rename = (folder / "model.safetensors").read_bytes(), Path.rename

    def killed(path, target):
        if path.suffix == ".new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(byte_tokenizer(), make(seed=2))
    assert (folder.with_name("checkpoint.old") / "model.safetensors").read_bytes() == before
    after = (folder.with_name("checkpoint.new") / "model.safetensors").read_bytes()
    monkeypatch.undo()
    saved(byte_tokenizer(), make(seed=2))
    assert (folder / "model.safetensors").read_bytes() == after != before
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_a_model_that_cannot_be_written_names_its_folder(saved, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(NeedleworkForCausalLM, "save_pretrained", full)
    with pytest.raises(OSError, match=rf"{tmp_path / 'checkpoint'}: the model cannot be written \(I/O error: No space left"):
        saved(byte_tokenizer())


def test_a_tokenizer_that_does_not_fit_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer: end of text is 256, 257 tokens; expected .* at most vocab_size = 200"):
        saved(byte_tokenizer(), make(200))
    with pytest.raises(ValueError, match="tokenizer: end of text is 300"):
        save_checkpoint(make(400), byte_tokenizer(), 300, tmp_path / "other")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_that_never_heard_of_needlework_loads_the_folder(saved, tmp_path, monkeypatch):
    folder, again = saved(byte_tokenizer()), tmp_path / "again"
    code = f"""
        import sys, torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
        assert not any(name.startswith("needlework") for name in sys.modules)
        tokenizer = AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)
        model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
        model.save_pretrained({str(again)!r})
        tokenizer.save_pretrained({str(again)!r})
        print(model(tokenizer("abc", return_tensors="pt")["input_ids"]).logits.double().sum().item())
    """
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    printed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    expected = make()(torch.tensor([list(b"abc")])).logits.double().sum().item()
    assert float(printed) == pytest.approx(expected, rel=1e-6)
    assert {path.name for path in again.iterdir()} == {path.name for path in folder.iterdir()}  # no file of ours was copied
    assert json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
