"""What the tests of suites share: a mirror of made-up data sets, no network, stand-ins for packages of lm-eval's extras that are not
installed, and tiny checkpoints of ours and of transformers."""

import difflib
import importlib.machinery
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from needlework.data import byte_tokenizer, eot_id, load_corpus
from needlework.layers import Attention, Polar, QDelta, Recurrent, SwiGLU
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, save_checkpoint

from .hub import write

MIXERS = {
    "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()),
    "P": Attention(heads=2, head_dim=8, attend=Polar()),
}
PUNKT = ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab")


def numbered(word, count):
    return [f"{word}{i}" for i in range(count)]


class RandomWord:
    """wonderwords' lists: RULER's needles are of an adjective and a noun, its word lists of all three kinds."""

    def __init__(self):
        self._categories = {"nouns": numbered("noun", 90), "adjectives": numbered("kind", 90), "verbs": numbered("verb", 90)}
        self._categories |= {"noun": numbered("a", 900), "adjective": numbered("b", 900), "verb": numbered("c", 900)}


class Rouge:
    def get_scores(self, said, wanted, avg):
        return {"rouge-l": {"f": difflib.SequenceMatcher(None, said[0], wanted[0]).ratio()}}


def ratio(a, b):
    return round(100 * difflib.SequenceMatcher(None, a, b).ratio())


STAND_INS = {
    "wonderwords": {"RandomWord": RandomWord},
    "jieba": {"cut": lambda text, cut_all: text.split()},
    "fuzzywuzzy": {"fuzz": SimpleNamespace(ratio=ratio)},
    "rouge": {"Rouge": Rouge},
}


@pytest.fixture(scope="session")
def extras(tmp_path_factory):
    """Every package of the extra `eval` can be imported: those that are not installed are stand-ins. nltk has (empty) rules of English."""
    nltk = pytest.importorskip("nltk")
    absent = [name for name in STAND_INS if find_spec(name) is None]
    for name in absent:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(STAND_INS[name])
        sys.modules[name] = module
    folder = tmp_path_factory.mktemp("nltk")
    for name in PUNKT:
        (folder / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True, exist_ok=True)
        (folder / "tokenizers" / "punkt_tab" / "english" / name).touch()
    nltk.data.path.append(str(folder))
    yield absent
    nltk.data.path.remove(str(folder))
    for name in absent:
        del sys.modules[name]


@pytest.fixture(scope="session")
def mirror(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mirror") / "hub")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """The Hub is not asked, and nothing of these tests stays in a cache."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A model of ours, by bytes, whose logits are far from uniform."""
    folder = tmp_path_factory.mktemp("runs") / "tiny" / "checkpoint"
    folder.parent.mkdir()
    torch.manual_seed(0)
    config = NeedleworkConfig(hidden_size=16, layout="QP", mixers=MIXERS, mlp=SwiGLU(hidden=24), initializer_range=0.4)
    tokenizer = byte_tokenizer()
    save_checkpoint(NeedleworkForCausalLM(config), tokenizer, eot_id(tokenizer), folder)
    return folder


@pytest.fixture(scope="session")
def others(tmp_path_factory):
    """Two models of transformers, by bytes: a Llama, and a GPT-2 with a table of 64 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from needlework.models.checkpoint import write_tokenizer

    folder = tmp_path_factory.mktemp("others")
    torch.manual_seed(0)
    small = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "initializer_range": 0.4}
    llama = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, **small
    )
    models = {
        "llama": LlamaForCausalLM(llama),
        "gpt2": GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=16, n_layer=1, n_head=2, **small)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        write_tokenizer(byte_tokenizer(), "<|eot|>", folder / name)
    return folder


@pytest.fixture
def subject(checkpoint, mirror, offline, extras, small_text):
    """The model of ours, to be measured on the first two documents of the mirror's data sets."""
    from needlework.experiment.suites import subject_of

    return subject_of(str(checkpoint), lambda tokenizer: load_corpus(small_text, tokenizer), data=mirror, limit=2)
