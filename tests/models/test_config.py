"""The model's config: its ranges, its keys and transformers', what follows from the layout, and its file."""

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
from transformers import AutoConfig

from needlework.layers import Attention, Carve, Delta, QDelta, Recurrent, Rope, Softmax, SquaredReLU, SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM

MIXERS = {
    "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()),
    "C": Recurrent(heads=2, key_dim=8, value_dim=8, write=Carve(rank=2, content_chunk=4)),
    "S": Attention(heads=2, head_dim=8, attend=Softmax(window=5), position=Rope()),
}
GOLDENS = sorted((Path(__file__).parents[1] / "goldens").glob("*.json"))
SIZES = Sizes(heads=2, key_dim=8, value_dim=12, attention_heads=4, kv_heads=2, head_dim=8, half_life=32.0, content_chunk=8)


def config(layout="QS", **settings):
    return NeedleworkConfig(
        **{"vocab_size": 61, "hidden_size": 16, "layout": layout, "mixers": MIXERS, "mlp": SwiGLU(hidden=24)} | settings
    )


NOT_A_NUMBER = ("x", math.nan, math.inf, True)
BAD = {
    "vocab_size": (0, -1, 2.5, None, *NOT_A_NUMBER),
    "hidden_size": (0, -1, 2.5, None, *NOT_A_NUMBER),
    "softcap": (0, -1.0, *NOT_A_NUMBER),
    "initializer_range": (-0.1, *NOT_A_NUMBER),
    "pad_token_id": (-1, 1.5, "x"),
    "bos_token_id": (-1, 1.5, "x"),
    "eos_token_id": (-1, 1.5, "x"),
    "layout": (None, 3, ["Q", "S"]),
    "tie_word_embeddings": (1, None, "yes"),
    "head_bias": (1, None),
    "zero_output": (1, None),
    "scaled_output": (1, None),
    "use_cache": (1, None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_field_out_of_its_range_is_refused_by_name_when_made_and_when_set(name):
    made = config()
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"^config: {name} is .*, expected ") as error:
            config(**{name: value})
        assert repr(value) in str(error.value)
        with pytest.raises(ValueError, match=f"config: {name} is "):
            setattr(made, name, value)
    assert made.to_dict() == config().to_dict()


def test_a_whole_number_is_a_softcap():
    capped = config(softcap=15)
    assert capped.softcap == 15.0 and isinstance(capped.softcap, float)


@pytest.mark.parametrize(
    "key, nearest", [("hiddensize", "hidden_size"), ("vocabsize", "vocab_size"), ("soft_cap", "softcap"), ("n_layer", None)]
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key, nearest):
    with pytest.raises(ValueError, match=f"unknown key '{key}'" + (rf" \(did you mean '{nearest}'\?\)" if nearest else ";")):
        config(**{key: 64})
    with pytest.raises(ValueError, match=f"unknown key '{key}'"):
        NeedleworkConfig.from_dict(config().to_dict() | {key: 64})


def test_transformers_own_keys_pass():
    theirs = {
        "_name_or_path": "a/folder", "model_type": "needlework", "transformers_version": "5.17.0", "torch_dtype": "float32",
        "architectures": ["NeedleworkForCausalLM"], "auto_map": {"AutoConfig": "m.C"}, "use_cache": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "output_hidden_states": True, "output_scores": True, "return_dict": False,
        "num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}, "problem_type": None, "tokenizer_class": "T",
        "quantization_config": {"quant_method": "x"}, "_attn_implementation_autoset": True, "temperature": 0.5, "max_length": 9,
        "attn_implementation": None, "chunk_size_feed_forward": 0, "is_decoder": True, "_commit_hash": None,
    }  # fmt: skip
    made = config(**theirs)
    assert (made.pad_token_id, made.bos_token_id, made.eos_token_id, made.use_cache) == (0, 1, 2, False)
    assert config(dtype="float32").dtype is made.dtype


@pytest.mark.parametrize(
    "given, name", [({"num_hidden_layers": 3}, "num_hidden_layers"), ({"layer_types": ["x"]}, "layer_types")]
)
def test_what_follows_from_the_layout_may_not_say_something_else(given, name):
    with pytest.raises(ValueError, match=f"config: {name} is .*, expected .* layout 'QS'"):
        config(**given)
    with pytest.raises(ValueError, match=f"config: {name} is "):
        NeedleworkConfig.from_dict(config().to_dict() | given)
    with pytest.raises(ValueError, match=f"config: {name} is "):
        config().replaced(**given)
    follows = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    assert config(**follows).to_dict() == config().to_dict()


def test_another_layout_or_mixer_is_another_config():
    longer = config().replaced(layout="QSQ")
    assert longer.num_hidden_layers == 3 and longer.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    bound = config().with_mixer(1, MIXERS["C"])
    assert bound.layer_types == ["linear_attention"] * 2 and bound.mixer(bound.layout[1]) == MIXERS["C"]
    assert config().full_context().mixer("S").attend.window is None


@pytest.mark.parametrize("name, value", [("layout", "Q"), ("mixers", {}), ("mlp", None), ("num_hidden_layers", 1)])
def test_a_config_that_is_made_keeps_its_model(tmp_path, name, value):
    made = config()
    with pytest.raises(ValueError, match=rf"config: {name} is fixed .*replaced\("):
        setattr(made, name, value)
    NeedleworkForCausalLM(made).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"config: {name} is fixed"):
        NeedleworkForCausalLM.from_pretrained(tmp_path, **{name: value})
    assert made.to_dict() == NeedleworkForCausalLM(made).config.to_dict()


def test_components_that_do_not_belong_are_refused_when_the_config_is_made():
    broken = {"kind": "recurrent", "heads": 1, "key_dim": 8, "value_dim": 8, "write": {"kind": "qdlta"}}
    for given, message in (
        ({"layout": "QX"}, "no mixer for 'X'; mixers has Q, C, S"),
        ({"mixers": {"Q": broken, "S": MIXERS["S"]}}, r"unknown kind 'qdlta' \(did you mean 'qdelta'\?\)"),
        (
            {"mixers": MIXERS | {"Q": MIXERS["Q"].to_dict() | {"heads": 0}}},
            "recurrent: heads is 0, expected a whole number >= 1",
        ),
        (
            {"mixers": MIXERS | {"Q": SwiGLU(hidden=8)}},
            r"mixers\['Q'\]: got kind 'swiglu', expected one of recurrent, attention",
        ),
        ({"mixers": MIXERS | {"Q": Delta().to_dict()}}, r"mixers\['Q'\]: got kind 'delta'"),
        ({"mixers": MIXERS | {"Q": 3}}, r"mixers\['Q'\]: got kind 3"),
        ({"mixers": [1]}, r"mixers is \[1\], expected a dict or None"),
        ({"mlp": MIXERS["Q"]}, "mlp: got kind 'recurrent', expected one of swiglu, squared_relu"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**given)


def test_a_config_survives_its_file_a_copy_and_a_pickle(tmp_path):
    first = config(mlp=SquaredReLU(hidden=24), softcap=15, eos_token_id=3)
    first.save_pretrained(tmp_path)
    for again in (AutoConfig.from_pretrained(tmp_path), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert again.to_diff_dict() == first.to_diff_dict()
        assert again.mixer("C") == MIXERS["C"]
    assert json.loads((tmp_path / "config.json").read_text())["mixers"]["Q"]["write"]["kind"] == "qdelta"


@pytest.mark.parametrize("name", CATALOG)
def test_every_mixer_of_the_catalog_survives_its_file(tmp_path, name):
    mixer = CATALOG[name].make(SIZES)
    first = config("MM", mixers={"M": mixer})
    first.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_diff_dict() == first.to_diff_dict() and again.mixer("M") == mixer


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_a_config_written_earlier_loads_and_is_written_as_it_was(tmp_path, path):
    written = json.loads(path.read_text())["config"]
    for version in ("5.17.0", "5.23.0", "5.99.0"):
        file = {"architectures": ["NeedleworkForCausalLM"], "dtype": "float32", "transformers_version": version}
        (tmp_path / "config.json").write_text(json.dumps(written | file))
        again = AutoConfig.from_pretrained(tmp_path).to_diff_dict()
        assert {name: again[name] for name in written} == written
