"""What a client asks for is checked when it is made; the error names the field, the value and the range."""

import pytest

from needlework.serve.request import Event, Request, Sampling


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("temperature", -0.1, ">= 0"),
        ("temperature", float("nan"), ">= 0"),
        ("top_k", 1.5, "a whole number >= 0"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("min_p", 1.0, r"in \[0, 1\)"),
        ("presence_penalty", 2.5, r"in \[-2, 2\]"),
        ("frequency_penalty", "1", r"in \[-2, 2\]"),
        ("repetition_penalty", 0, "> 0"),
        ("seed", -1, ">= 0, of 64 bits"),
        ("logprobs", True, "a whole number >= 0"),
    ],
)
def test_sampling_refuses_what_is_out_of_range(field, value, expected):
    with pytest.raises(ValueError, match=rf"sampling: {field} is .*, expected .*{expected}"):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("id", 7, "a string"),
        ("prompt", (), "a tuple of at least one token id >= 0"),
        ("prompt", (1, -1), "token id >= 0"),
        ("prompt", (1, 2.0), "token id >= 0"),
        ("prompt", [1, 2], "a tuple"),
        ("max_tokens", 0, "a whole number >= 1"),
        ("stop_tokens", frozenset({-3}), "a frozenset of token ids >= 0"),
        ("grammar", 1, "a string or None"),
        ("sampling", None, "a Sampling"),
    ],
)
def test_a_request_refuses_what_is_out_of_range(field, value, expected):
    with pytest.raises(ValueError, match=rf"request: {field} is .*, expected .*{expected}"):
        Request(**{"id": "a", "prompt": (1,), "max_tokens": 1} | {field: value})


def test_an_event_ends_an_answer_by_one_of_four_words():
    assert Event(token=3, finish="stop").finish == "stop"
    with pytest.raises(ValueError, match="event: finish is 'eos'"):
        Event(finish="eos")
