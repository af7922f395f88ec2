"""Pieces are the objects of `Answers` as JSON, whether they are written whole or around their text."""

import json
from itertools import product
from types import SimpleNamespace

import pytest

from needlework.serve.answers import Answers
from needlework.serve.choice import Delta, Scored
from needlework.serve.pieces import HERE, Pieces, event
from needlework.serve.request import Sampling
from needlework.serve.text import Piece

TEXTS = ("a", ' "quoted" \\ \n\t\x00', "é中👍\u2028", "\ue000", '{"text":""}', "")


@pytest.mark.parametrize("chat, usage, logprobs", [*product((False, True), (False, True), (None, 0))])
def test_a_piece_is_its_object(chat, usage, logprobs):
    asked = SimpleNamespace(chat=chat, usage=usage, prompts=((1,),), sampling=Sampling(logprobs=logprobs))
    answers = Answers('an "id"', asked, HERE)
    pieces = Pieces(answers)
    scored = [] if logprobs is None else [Scored(Piece("a", (97,)), -0.5, (), 0)]
    for text, index, finish in product(TEXTS, (1, 0), (None, "stop")):
        delta = Delta(text, scored, finish)
        said = pieces.piece(index, delta)
        assert said == event(answers.piece(index, delta))
        assert said.startswith(b"data: ") and said.endswith(b"\n\n") and said.count(b"\n") == 2
        assert json.loads(said.removeprefix(b"data: "))["choices"][0]["index"] == index


def test_tokens_of_one_text_have_the_logprob_of_the_likeliest_and_the_answers_own_is_there():
    asked = SimpleNamespace(chat=False, usage=False, prompts=((1,),), sampling=Sampling(logprobs=2))
    torn = [Piece("\ufffd", (byte,)) for byte in (0xC3, 0xE4)]
    scored = [Scored(Piece("b", (98,)), -4.0, ((torn[0], -1.0), (torn[1], -2.0)), 0)]
    (choice,) = Answers("x", asked, "m").whole([Delta("b", scored, "stop")], 1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0, "b": -4.0}]
