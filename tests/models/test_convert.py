"""Published checkpoints as needlework's: models made by transformers itself, whose logits ours must have, and what is refused by name."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from needlework.data import Files, StoreConfig, byte_tokenizer
from needlework.experiment.evaluate import Evaluation
from needlework.experiment.pretrained import load_model
from needlework.experiment.runner import run
from needlework.layers import Attention, Lucid, Softmax
from needlework.models import NeedleworkConfig
from needlework.models.convert import Change, convert
from needlework.models.convert.layouts import LAYOUTS
from needlework.models.tokenizer import load_vocabulary
from needlework.recipes.finetune import from_checkpoint

SMALL = dict(
    vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SMALL, rms_norm_eps=1e-4, eos_token_id=[256, 7]),
    "llama, tied, with biases": LlamaConfig(
        **SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12, bos_token_id=None, pad_token_id=-1
    ),
    "llama 3.1": LlamaConfig(**SMALL, rope_parameters=LLAMA3, max_position_embeddings=4096),
    "qwen3": Qwen3Config(**SMALL, head_dim=24, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3, windows": Qwen3Config(**SMALL, head_dim=8, use_sliding_window=True, sliding_window=9, max_window_layers=1),
}
CLASSES = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}


def peer(config, seed=0):
    """transformers' model; norms away from 1, biases from 0."""
    torch.manual_seed(seed)
    model = CLASSES[config.model_type](config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def tokens(T=90):
    return torch.randint(257, (2, T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    return model(tokens()).logits


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Llama's folder as the Hub has it: weights in parts, a tokenizer, a licence."""
    folder = tmp_path_factory.mktemp("llama")
    peer(MODELS["llama"]).save_pretrained(folder, max_shard_size="20KB")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|eot|>", chat_template="{{ messages }}")
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE.txt").write_text("some licence")
    return folder


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "source")


@pytest.mark.parametrize("name", MODELS)
def test_ours_has_the_logits_of_transformers(name, tmp_path):
    theirs = peer(MODELS[name])
    theirs.save_pretrained(tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "ours")
    ours = load_model(tmp_path / "ours").eval()
    assert (logits(ours) - logits(theirs)).abs().max() <= 1e-5
    assert done.parameters == theirs.num_parameters() == ours.num_parameters() and not done.new and not done.tokenizer
    assert ours.config.bos_token_id == MODELS[name].bos_token_id and ours.config.pad_token_id is None


def test_the_folder_has_what_the_source_had_and_generates_what_it_generates(folder, tmp_path, needlework):
    said = needlework("convert", folder, tmp_path / "ours")
    assert "llama: 3 layers" in said and "39,712 parameters" in said
    card = (tmp_path / "ours" / "README.md").read_text()
    assert (
        "Converted by needlework from source." in card and str(tmp_path) not in card
    )  # a place of this machine is nobody's business
    theirs, ours = peer(MODELS["llama"]), load_model(tmp_path / "ours")
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(tokens(), **asked), theirs.generate(tokens(), **asked))
    assert ours.generation_config.eos_token_id == [256, 7] and ours.config.eos_token_id == 256
    before, after = (AutoTokenizer.from_pretrained(place) for place in (folder, tmp_path / "ours"))
    assert before("naïve ☃").input_ids == after("naïve ☃").input_ids and after.chat_template == "{{ messages }}"
    assert (tmp_path / "ours" / "LICENSE.txt").read_text() == "some licence"
    assert load_vocabulary(tmp_path / "ours").ends == {256, 7}  # for `serve`
    assert needlework("generate", tmp_path / "ours", "--prompt", "abc", "--tokens", 3).startswith("abc")


def test_a_tokenizers_own_beginning_of_text_stands_before_a_prompt(folder, tmp_path, needlework):
    """Llama's: its model never saw a text without it."""
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|eot|> $A", special_tokens=[("<|eot|>", 256)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eot|>", bos_token="<|eot|>").save_pretrained(folder)
    convert(folder, tmp_path / "ours")
    ours = load_model(tmp_path / "ours").eval()
    ids = torch.tensor([[256, *b"abc"]])
    told = ours.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 4:]
    said = needlework("generate", tmp_path / "ours", "--prompt", "abc", "--tokens", 4)
    assert said.rstrip("\n").endswith(tokenizer.decode(told.tolist()))


def changed(folder, **values):
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x != "gone"}))


def rewritten(folder, change):
    part = sorted(folder.glob("model-*.safetensors"))[-1]
    tensors = load_file(part)
    change(tensors)
    save_file(tensors, part, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: changed(f, model_type="lama"), r"model_type is 'lama' \(did you mean 'llama'\?\), expected one of llama, qwen3, gla"),
        (lambda f: changed(f, model_type="gone"), "config.json: model_type is missing"),
        (lambda f: changed(f, attention_sink=True), "config.json: unknown key 'attention_sink'"),
        (lambda f: changed(f, hidden_act="gelu"), "hidden_act is 'gelu', which no layer of needlework has; expected 'silu' or 'swish'"),
        (lambda f: changed(f, rope_parameters=LLAMA3 | {"rope_type": "yarn"}), "rope_parameters: rope_type is 'yarn', which no layer"),
        (lambda f: changed(f, rope_parameters=LLAMA3 | {"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5, which no"),
        (lambda f: changed(f, num_hidden_layers=2), r"source: 9 tensors of it are left over, .*: model\.layers\.2\.input_layernorm"),
        (lambda f: changed(f, num_hidden_layers=4), r"model\.layers\.3\.self_attn\.q_proj\.weight is missing, which model\.blocks\.3"),
        (lambda f: changed(f, intermediate_size=64), r"mlp\.gate_proj\.weight gives .* \[48, 32\], expected \[64, 32\] of its config"),
        (lambda f: changed(f, tie_word_embeddings=True), "tie_word_embeddings is true, and lm_head.weight is another tensor"),
        (lambda f: rewritten(f, lambda t: t.pop(next(iter(t)))), "is missing, which model"),
        (lambda f: rewritten(f, lambda t: t.update(scales=torch.ones(3))), "1 tensors of it are left over, .*: scales"),
        (lambda f: rewritten(f, lambda t: t.update(a=torch.ones(3, dtype=torch.int8))), "a is torch.int8, a quantised tensor"),
        (lambda f: sorted(f.glob("model-*"))[0].unlink(), r"model-00001-of-\d+\.safetensors is missing, which model\.safetensors\.index"),
        (lambda f: [part.unlink() for part in f.glob("model*")], "no weights there; expected model.safetensors"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_nothing_is_written(folder, tmp_path, damage, says):
    damage(folder)
    with pytest.raises(ValueError, match=says):
        convert(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_buffers_that_old_checkpoints_have_are_left_out(folder, tmp_path):
    rewritten(folder, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    convert(folder, tmp_path / "ours")


def test_a_folder_that_holds_something_is_left_alone(folder, tmp_path):
    (tmp_path / "ours").mkdir()
    convert(folder, tmp_path / "ours")  # an empty one is taken
    with pytest.raises(ValueError, match="ours: there is something there already"):
        convert(folder, tmp_path / "ours")


def test_pickled_weights_are_read_as_tensors_alone(folder, tmp_path):
    for part in folder.glob("model*"):
        part.unlink()
    torch.save({"state_dict": peer(MODELS["llama"]).state_dict()}, folder / "pytorch_model.bin")
    convert(folder, tmp_path / "ours")
    assert torch.equal(logits(load_model(tmp_path / "ours").eval()), logits(load_model(tmp_path / "ours").eval()))
    torch.save({"a": MODELS}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: torn, or no file of tensors"):
        convert(folder, tmp_path / "again")


# a change of an existing model


def test_lucid_takes_the_place_of_softmax_and_every_weight_stays(folder, tmp_path, needlework):
    said = needlework("convert", folder, tmp_path / "ours", "--attend", "lucid", "--layers", "0,2")
    assert "lucid in layers 0, 2" in said
    ours, theirs = load_model(tmp_path / "ours").eval(), peer(MODELS["llama"])
    assert [mixer.attend.kind for mixer in ours.config.each_layer()] == ["lucid", "softmax", "lucid"]
    plain = NeedleworkConfig.from_dict(ours.config.to_dict()).replaced(layout="a" * 3)
    assert (logits(load_model(tmp_path / "ours", plain).eval()) - logits(theirs)).abs().max() <= 1e-5
    theirs.set_attn_implementation("lucid")
    lucid = Change(attend="lucid").of(plain)
    assert (logits(load_model(tmp_path / "ours", lucid).eval()) - logits(theirs)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["llama 3.1", "qwen3", "qwen3, windows"])
def test_lucid_in_a_converted_model_is_lucid_in_the_model_of_transformers(name, tmp_path):
    theirs = peer(MODELS[name])
    theirs.save_pretrained(tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "ours", Change(attend="lucid"))
    assert not done.new and done.parameters == theirs.num_parameters()
    plain = logits(theirs)
    theirs.set_attn_implementation("lucid")
    found, expected = logits(load_model(tmp_path / "ours").eval()), logits(theirs)
    assert (found - expected).abs().max() <= 1e-5 and (found - plain).abs().max() > 1e-3


def test_a_changed_model_is_trained_further_by_a_recipe(folder, small_text, tmp_path):
    peer(MODELS["llama"]).bfloat16().save_pretrained(folder, max_shard_size="20KB")
    convert(folder, tmp_path / "lucid", Change(attend="lucid", layers=(1,)))
    assert load_model(tmp_path / "lucid").dtype == torch.bfloat16
    text = StoreConfig(source=Files(paths=small_text.paths, held_out=0.2), tokenizer=str(tmp_path / "lucid"))
    recipe = from_checkpoint(tmp_path / "lucid", steps=6, batch=2, length=64, lr=3e-3, corpus=text)
    recipe = dataclasses.replace(recipe, evaluate=Evaluation(lengths=(64,), tokens=64, rows=1, tasks=("needle",)))
    entry = run(recipe, tmp_path / "runs" / "tuned" / "lucid")
    assert entry["train"]["loss"][-1] < entry["train"]["loss"][0]
    tuned = load_model(tmp_path / "runs" / "tuned" / "lucid" / "checkpoint")
    assert tuned.dtype == torch.float32  # small steps are lost in half precision
    assert [mixer.attend.kind for mixer in tuned.config.each_layer()] == ["softmax", "lucid", "softmax"]


def test_a_window_and_a_scale_stay_where_lucid_comes():
    window = Attention(heads=2, head_dim=8, attend=Softmax(window=7, scale=0.5))
    config = NeedleworkConfig(
        vocab_size=9, hidden_size=16, layout="aab", mixers={"a": window, "b": Attention(heads=2, head_dim=8, attend=Softmax())}
    )
    made = Change(attend="lucid", layers=(1,)).of(config)
    assert [mixer.attend for mixer in made.each_layer()] == [
        Softmax(window=7, scale=0.5),
        Lucid(window=7, scale=0.5),
        Softmax(),
    ]
    assert {mixer.attend.kind for mixer in Change(attend="lucid").of(config).each_layer()} == {"lucid"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attend": "lucit"}, r"attend: unknown 'lucit' \(did you mean 'lucid'\?\), expected lucid"),
        ({"attend": "lucid", "layers": (3,)}, "layers: 3 is none of the model's 3, expected 0 to 2"),
        ({"layers": (1,)}, "layers: no rule is given"),
        ({"read": "ccq"}, r"read: layer 0 is 'attention'. CCQ cleans the query that reads a recurrent state, o = Sᵀ\(I − λΣ\)q; attention has"),
    ],
)  # fmt: skip
def test_a_change_that_cannot_be_is_refused_with_the_reason(folder, tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        convert(folder, tmp_path / "ours", Change(**change))


def test_every_layout_has_a_file_of_its_name():
    assert {name: read.__module__.rpartition(".")[2] for name, read in LAYOUTS.items()} == {name: name for name in LAYOUTS}
