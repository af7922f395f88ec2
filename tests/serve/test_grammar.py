"""Grammars: whatever a model would rather say, its answer matches. Tokens are drawn at random from those that the masks allow."""

import json
import random
import re
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")

from needlework.models.tokenizer import Vocabulary
from needlework.serve.grammar import Grammar, of_regex, of_schema
from needlework.serve.interface import GrammarError
from needlework.serve.text import Text

from .texts import END, byte_text, words

V = 300  # more than the tokenizer has: a model's vocabulary may be padded
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["user", "é中"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "kind", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def grammar():
    return Grammar(byte_text(), V)


def allowed(matcher):
    bits = matcher.bits()
    assert bits.shape == (-(-V // 32),) and str(bits.dtype) == "torch.int32"
    return [token for token in range(32 * len(bits)) if int(bits[token // 32]) >> token % 32 & 1]


def walk(matcher, rng, most=400):
    """Tokens of one answer."""
    tokens = []
    while len(tokens) < most:
        token = rng.choice(allowed(matcher))
        over = matcher.take(token)
        if token == END:
            return tokens
        tokens.append(token)
        if over:
            return tokens
    raise AssertionError(f"no end after {most} tokens: {bytes(tokens)!r}")


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_of_the_schema(grammar, seed):
    said: Any = json.loads(bytes(walk(grammar(of_schema(PERSON)), random.Random(seed))).decode())
    assert list(said) == ["name", "age", "kind", "tags", "next"] and len(said["name"]) <= 6
    assert 0 <= said["age"] <= 150 and said["kind"] in ("user", "é中") and said["next"] in (None, {"x": 1})
    assert len(said["tags"]) <= 3 and all(isinstance(tag, bool) for tag in said["tags"])


@pytest.mark.parametrize("seed", range(8))
def test_every_answer_matches_the_regular_expression_whole(grammar, seed):
    pattern = r"(yes|no|maybe é){1,3}, [0-9]{2,4}\.?"
    assert re.fullmatch(pattern, bytes(walk(grammar(of_regex(pattern)), random.Random(seed))).decode())


def test_json_is_on_one_line_as_pythons_is():
    matcher = Grammar(byte_text(), V)(of_schema({"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}))
    assert bytes(walk(matcher, random.Random(0))) == b"[1, 1]"


def test_a_text_may_end_where_the_grammar_is_matched_and_only_there(grammar):
    matcher = grammar(of_regex("ab+"))
    assert allowed(matcher) == [97] and not matcher.take(97)
    assert allowed(matcher) == [98] and not matcher.take(98)
    assert allowed(matcher) == [98, END] and matcher.take(END)


def test_a_grammar_that_nothing_can_follow_ends_the_answer(grammar):
    matcher = grammar(of_regex("ab"))
    assert not matcher.take(97) and matcher.take(98)


@pytest.mark.parametrize("vocabulary", (257, 287, 288, 289, 320, 8192))
def test_a_mask_has_the_vocabularys_bits_and_no_word_more(vocabulary):
    """llguidance's has one more where 32 divides the vocabulary, as it does that of most models."""
    matcher = Grammar(byte_text(), vocabulary)(of_regex("ab"))
    for one in (matcher, matcher.copy()):
        assert one.bits().shape == (-(-vocabulary // 32),)


def test_matchers_of_one_grammar_go_their_own_ways(grammar):
    one, other = (grammar(of_regex("ab|cd")) for _ in range(2))
    one.take(97)
    assert allowed(one) == [98] and allowed(other) == [97, 99]


def test_tokens_of_several_characters_are_one_step():
    tokenizer = words()
    text = Text(Vocabulary(tokenizer, None, frozenset({0}), None))
    matcher = Grammar(text, V)(of_regex(" ab"))
    assert allowed(matcher) == [tokenizer.token_to_id("▁a")]  # of text that is certain, the tokenizer's own tokens
    assert not matcher.take(tokenizer.token_to_id("▁a")) and matcher.take(tokenizer.token_to_id("b"))


def test_a_grammar_beyond_the_limits_is_refused_before_it_is_followed(grammar):
    with pytest.raises(GrammarError, match=r"^grammar: lexer error: too many [^\n]*$"):
        grammar(of_regex("((a{100}){100}){100}"))


def test_what_meets_the_limits_on_its_way_is_an_error_and_no_end(grammar):
    matcher = grammar(of_regex("bc*d((a{100}){100}){100}"))
    matcher.take(98), matcher.take(100)
    matcher.bits()
    with pytest.raises(GrammarError, match=r"^grammar: lexer error: too many [^\n]*$"):
        matcher.take(97)
    assert allowed(grammar(of_regex("b"))) == [98]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: of_regex("a?" * 5000), "a regular expression of 10000 characters, expected at most 8192"),
        (lambda: of_schema({"enum": ["a" * 70000]}), "a schema of 70014 characters, expected at most 65536"),
        (
            lambda: of_schema({"anyOf": [{"pattern": "a?" * 3000}, {"patternProperties": {"b" * 3000: {}}}]}),
            "regular expressions of 9000 characters, expected at most 8192",
        ),
    ],
    ids=range(3),
)
def test_the_size_of_a_grammar_is_bounded_by_field(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_regular_expression_may_have_as_many_characters_as_the_bound():
    assert of_regex("a" * 8192)


@pytest.mark.parametrize(
    "wrong", [of_regex("(a"), of_schema({"type": "nothing"}), of_schema({"$ref": "http://x/y"})], ids=range(3)
)
def test_what_is_no_grammar_is_refused_with_the_reason(grammar, wrong):
    with pytest.raises(GrammarError, match=r"(?s)grammar: .*(unclosed|nothing|registry)"):
        grammar(wrong)
