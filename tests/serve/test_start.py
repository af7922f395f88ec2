"""An engine made for a machine: it takes what it may, cuts prompts where the model's chunks end, answers as `generate`, or says what
lacks."""

import re
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models

from needlework.layers import Attention, Path
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.models.tokenizer import Vocabulary
from needlework.serve.costs import costs
from needlework.serve.interface import GrammarError
from needlework.serve.request import Sampling
from needlework.serve.start import Room, start
from needlework.serve.text import Text
from tests.models.test_table_cache import MIXERS

from .serving import generated, requests
from .texts import END, byte_text

ROOM = Room(length=160, batch=4, snapshots=2, memory=0.01)


def made(vocabulary, mixers=MIXERS):
    torch.manual_seed(0)
    config = NeedleworkConfig(vocab_size=vocabulary, hidden_size=32, layout="".join(mixers), mixers=mixers)
    return NeedleworkForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def model():
    return made(257)


@pytest.fixture(scope="module")
def started(model):
    engine, config = start(model, byte_text(), ROOM)
    with engine:
        yield engine, config


def test_it_answers_as_generate(model, started):
    asked = requests(6)
    streams = [started[0].add(request) for request in asked]
    assert [[event.token for event in stream] for stream in streams] == generated(model, asked)


def test_an_answer_matches_its_grammar_whole_where_32_divides_the_vocabulary():
    pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
    from needlework.serve.grammar import of_regex

    model = made(288, {"M": MIXERS["M"]})
    asked = [replace(one, max_tokens=20, grammar=of_regex("(ab|cd){5}")) for one in requests(2)]
    with start(model, byte_text(), ROOM)[0] as engine:
        for stream in [engine.add(one) for one in asked]:
            tokens = [event.token for event in stream if event.token is not None]
            assert re.fullmatch(b"(ab|cd){5}", bytes(token for token in tokens if token != END))


def test_with_a_tokenizer_that_llguidance_cannot_read_grammars_alone_are_refused():
    pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    model, asked = made(288, {"M": MIXERS["M"]}), requests(1)
    with start(model, Text(Vocabulary(tokenizer, None, frozenset(), None)), ROOM)[0] as engine:
        with pytest.raises(GrammarError, match=r"^grammar: llguidance cannot read this model's tokenizer, .* ByteFallback: "):
            engine.add(replace(asked[0], grammar="x"))
        assert [[event.token for event in engine.add(asked[0])]] == generated(model, asked)


def test_prompts_are_cut_where_the_chunks_of_every_layer_end(model, started, monkeypatch):
    held = model.model.held()
    assert [one.cut for one in held if one.cut > 1] == [MIXERS["C"].write.content_chunk] and started[1].align == 64
    monkeypatch.setattr(model.model, "held", lambda: [one._replace(cut=48) if one.cut > 1 else one for one in held])
    engine, config = start(model, byte_text(), ROOM)
    engine.close()
    assert config.align == 192 and config.budget >= 192


def test_it_holds_what_was_asked_for_within_the_memory(started):
    config = started[1]
    assert (config.length, config.batch, config.slots) == (160, 4, 6) and config.prefix
    assert all(pages >= 6 for _, pages, _ in config.pools)


def test_the_bytes_of_the_plan_are_those_of_the_tensors_that_are_held(model, started):
    """Every tensor of the runner that does not go with the model or with a step, once requests with penalties have run."""
    engine, config = started
    for stream in map(engine.add, requests(3, seed=7, sampling=Sampling(presence_penalty=0.5, repetition_penalty=1.3))):
        list(stream)
    runner = engine._runner
    held = [runner.tables.slots, *runner.tables.pages.values(), *runner.counts]
    held += [x for x in vars(runner).values() if isinstance(x, torch.Tensor)]
    assert sum(x.numel() * x.itemsize for x in held) == config.nbytes
    assert config.nbytes > runner.tables.bytes + config.slots * 5 * runner.vocabulary


def test_a_model_that_writes_its_pages_again_shares_none_unless_it_is_asked_to_and_then_is_refused(model):
    again = made(257, {"H": Attention(heads=4, kv_heads=2, head_dim=8, attend=Path())})
    for one, shared in ((model, 1), (again, 0)):
        engine, config = start(one, byte_text(), Room(length=160, batch=1, memory=0.01))
        engine.close()
        assert config.prefix is bool(shared) and config.slots == 1 + shared
    with pytest.raises(ValueError, match="layers 0 write their pages again"):
        start(again, byte_text(), ROOM)


def test_a_request_that_fits_nowhere_is_refused_with_the_bytes(model):
    with pytest.raises(ValueError, match=r"one request of 160 tokens needs [0-9,]+ bytes: a slot of "):
        start(model, byte_text(), Room(length=160, memory=0.0))


def test_costs_are_of_a_step_and_leave_nothing_behind(model):
    found = costs(model, 0.5, tokens=128, batch=3)
    assert found.weights == model.get_memory_footprint() and found.peak >= 0 and found.graphs == 0
    assert 0 < costs(model, 0.25, tokens=64, batch=1).memory <= found.memory


@pytest.mark.parametrize(
    "field, value, expected",
    [("length", 0, ">= 1"), ("batch", 2.5, "a whole number"), ("memory", 1.5, r"in \[0, 1\]"), ("waiting", 0, ">= 1")],
)
def test_a_room_names_the_field_that_is_out_of_range(field, value, expected):
    with pytest.raises(ValueError, match=f"room: {field} is {value}, expected .*{expected}"):
        Room(**{field: value})


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused():
    with pytest.raises(ValueError, match="the tokenizer has 257 tokens, expected at most the model's 67"):
        start(made(67), byte_text(), ROOM)
