"""What a client may ask for, and what it is refused with."""

import json

import pytest

from needlework.serve.asked import Limits, read
from needlework.serve.refused import RefusedError
from needlework.serve.request import Sampling
from needlework.serve.sent import HARMLESS, is_text

from .texts import END, byte_text

LIMITS = Limits("tiny", 64, 300)
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def asked(chat=False, **fields):
    prompt = {"messages": HELLO} if chat else {"prompt": "abc"}
    return read(json.dumps({"model": "tiny", **prompt, **fields}).encode(), chat, byte_text(), LIMITS)


def refused(body, chat=False):
    with pytest.raises(RefusedError) as caught:
        read(body if isinstance(body, bytes) else json.dumps(body).encode(), chat, byte_text(), LIMITS)
    return caught.value


BOTH = [
    ({"model": "other"}, "model"),
    ({"model": 3}, "model"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 62}, "max_tokens"),
    ({"max_tokens": 1 << 80}, "max_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"tools": [{}]}, "tools"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"colour": None, "shape": 1}, "shape"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "regex"}}, "response_format.pattern"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour"),
]
COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": [1, 300]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "x" * 64}, "prompt"),
    ({"prompt": "\udfff"}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"messages": HELLO}, "messages"),
]
CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x" * 60}]}, "messages"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
    ({"max_completion_tokens": 60}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"prompt": "abc"}, "prompt"),
]


def names_what_is_wrong(error):
    """The field, what was found there, and what is expected."""
    field, _, words = error.body["error"]["message"].partition(": ")
    found, _, expected = words.partition(", expected ")
    return field == error.body["error"]["param"] and bool(found) and bool(expected)


@pytest.mark.parametrize("chat", (False, True), ids=("completion", "chat"))
@pytest.mark.parametrize("wrong, field", BOTH, ids=lambda x: json.dumps(x)[:40])
def test_what_is_out_of_range_is_refused_by_the_name_of_its_field(chat, wrong, field):
    start = {"messages": HELLO} if chat else {"prompt": "abc"}
    error = refused({"model": "tiny"} | start | wrong, chat)
    assert error.body["error"]["param"] == field
    assert error.status == (404 if wrong.get("model") == "other" else 400)
    assert error.body["error"]["type"] == "invalid_request_error" and names_what_is_wrong(error)


@pytest.mark.parametrize("wrong, field", COMPLETION, ids=lambda x: json.dumps(x)[:40])
def test_a_completion_that_makes_no_sense_is_refused(wrong, field):
    error = refused({"prompt": "abc"} | wrong)
    assert error.body["error"]["param"] == field and names_what_is_wrong(error)


@pytest.mark.parametrize("wrong, field", CHAT, ids=lambda x: json.dumps(x)[:40])
def test_a_conversation_that_makes_no_sense_is_refused(wrong, field):
    error = refused({"messages": HELLO} | wrong, chat=True)
    assert error.body["error"]["param"] == field and names_what_is_wrong(error)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"temperature": NaN}', b'{"top_p": -Infinity}', b"[" * 100_000, b'{"a":' * 100_000]
    + [b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"],
    ids=range(10),
)
def test_what_is_no_json_object_is_refused(body):
    error = refused(body)
    assert error.status == 400 and "the body is" in str(error)


def test_a_number_too_large_for_a_float_is_out_of_range():
    assert refused(b'{"prompt": "a", "temperature": 1e999}').body["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    "body, field", (({"\ud800": 1}, r"\ud800"), ({"response_format": {"type": "text", "\ud800": 1}}, r"response_format.\ud800"))
)
def test_a_name_that_has_no_utf8_is_refused_in_utf8(body, field):
    error = refused({"prompt": "a"} | body)
    assert error.body["error"]["param"] == field and is_text(str(error))


def test_what_is_not_asked_has_openais_defaults():
    completion, chat = asked(), asked(chat=True)
    assert (completion.n, completion.stream, completion.stops, completion.sampling) == (1, False, (), Sampling())
    assert completion.most == (16,) and chat.most == (64 - len("user: hi\n"),)
    assert asked(prompt="x" * 60).most == (4,)
    assert completion.stop_tokens == {END} and asked(ignore_eos=True).stop_tokens == frozenset()


def test_tokens_of_an_answer_have_two_names_in_a_chat_and_one_in_a_completion():
    for name in ("max_completion_tokens", "max_tokens"):
        assert asked(chat=True, **{name: 7}).most == (7,)
    assert asked(chat=True, max_completion_tokens=7, max_tokens=7).most == asked(max_tokens=7).most == (7,)
    assert "max_completion_tokens" in str(refused({"model": "tiny", "prompt": "abc", "max_completion_tokens": 7}))


def test_as_many_and_as_long_stops_as_the_bounds_are_taken():
    stops = tuple(letter * 256 for letter in "abcd")
    assert asked(stop=list(stops)).stops == stops


def test_null_is_as_good_as_absent_and_harmless_fields_are_ignored():
    assert asked(temperature=None, n=None, stop=None, response_format=None, logprobs=None) == asked()
    assert asked(**dict.fromkeys(HARMLESS, "x"), best_of=1, echo=False, logit_bias={}, tools=[]) == asked()


def test_a_prompt_is_text_or_tokens_or_several():
    assert asked(prompt=[97, 299]).prompts == ((97, 299),)
    assert asked(prompt=["ab", "c"]).prompts == ((97, 98), (99,)) and asked(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))
    assert asked(prompt="").prompts == ((END,),)


def test_parts_of_a_message_are_its_text():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert asked(chat=True, messages=[{"role": "user", "content": parts}]).prompts == asked(chat=True).prompts


def test_sampling_is_handed_on_and_a_temperature_next_to_zero_is_greedy():
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1}
    found = asked(**fields, repetition_penalty=1.5, seed=7, logprobs=2).sampling
    assert found == Sampling(**fields, repetition_penalty=1.5, seed=7, logprobs=2)
    assert asked(temperature=1e-9).sampling.temperature == 0


def test_each_of_n_answers_has_a_request_and_a_seed_of_its_own():
    requests = asked(prompt=["a", "b"], n=2, seed=(1 << 63) - 1).requests("x")
    assert [(r.prompt, r.sampling.seed) for r in requests] == [
        ((97,), (1 << 63) - 1),
        ((97,), 0),
        ((98,), (1 << 63) - 1),
        ((98,), 0),
    ]
    assert len({r.id for r in requests}) == 4
    assert asked(seed=-1).requests("x")[0].sampling.seed == (1 << 63) - 1
    assert {r.sampling.seed for r in asked(n=8).requests("x")} == {None}
