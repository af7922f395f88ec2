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
