"""Text of an answer as its tokens come: whole characters, whatever the tokens; strings that end it, wherever their borders lie."""

import random

import pytest

from needlework.models.tokenizer import Vocabulary, load_vocabulary
from needlework.serve.text import LONG, TORN, Incremental, Stops, Text

from .texts import END, byte_text, folder, words

HARD = ("héllo 中文 👩‍👩‍👧 é", "\ufffd at � home \ufffd", "a\0b", "", "👍" * 30, "日本語" * 20)


def cuts(tokens, rng):
    """The tokens in runs of one to five."""
    at = 0
    while at < len(tokens):
        count = rng.randint(1, 5)
        yield tokens[at : at + count]
        at += count


def pieces(incremental, runs):
    return [*map(incremental.push, runs), incremental.rest()]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("seed", range(4))
def test_a_character_is_given_when_its_last_token_has_come_and_not_before(text, seed):
    tokens, rng = list(text.encode()), random.Random(seed)
    given = pieces(byte_text().after((10,)), cuts(tokens, rng) if seed else [[t] for t in tokens])
    assert "".join(given) == text


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_text_come_out_as_they_are_decoded_whole(seed):
    rng = random.Random(seed)
    alphabet = (0xFF, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x41, 0x80)[: rng.randint(1, 8)]
    tokens = [rng.choice(alphabet) for _ in range(300)]
    text = byte_text()
    given = pieces(text.after(()), cuts(tokens, rng))
    assert "".join(given) == text.decode(tokens) == bytes(tokens).decode(errors="replace")


def test_text_that_is_never_a_character_is_not_held_for_ever_nor_decoded_from_the_start():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return byte_text_decode(tokens)

    byte_text_decode = byte_text().decode
    incremental, given = Incremental(decode), ""
    for i in range(1, 500):
        given += incremental.push([0xFF])
        assert i - 3 <= len(given) <= i
        assert longest <= LONG + 1


def test_a_character_that_a_decoder_takes_back_stays_given():
    tokenizer = words()
    told = [*tokenizer.encode("👍", add_special_tokens=False).ids, tokenizer.token_to_id("<0xF0>")]
    assert TORN * 5 in tokenizer.decode(told)
    given = pieces(Text(Vocabulary(tokenizer, None, frozenset(), None)).after(()), [[token] for token in told])
    assert "".join(given).strip() == f"👍{TORN}"


@pytest.mark.parametrize("prompt, answer", [("a", " b a"), ("a", "bc"), ("中", "👍 中a"), ("a b", " 中👍👍"), ("é", " é")])
def test_spaces_of_words_and_bytes_of_unknown_characters_are_those_of_the_whole(prompt, answer):
    tokenizer = words()
    whole = tokenizer.encode(prompt + answer, add_special_tokens=False).ids
    for cut in range(1, len(whole)):
        text = Text(Vocabulary(tokenizer, None, frozenset(), None))
        front = text.decode(whole[:cut])
        if TORN not in front:
            given = pieces(text.after(whole[:cut]), [[token] for token in whole[cut:]])
            assert front + "".join(given) == prompt + answer


def test_a_special_token_has_no_text():
    text = byte_text()
    assert "".join(pieces(text.after((65,)), [[66], [END], [END], [67]])) == "BC"


def by_character(stops, text, size):
    found = Stops(stops)
    given = ""
    for at in range(0, len(text), size):
        given += found.push(text[at : at + size])
        if found.found:
            return given, True
    return given + found.rest(), False


@pytest.mark.parametrize("size", (1, 2, 3, 50))
@pytest.mark.parametrize(
    "stops, text, given",
    [
        (("\n\n",), "one\n\ntwo", "one"),
        (("\n\n",), "one\ntwo\n", "one\ntwo\n"),
        (("aab",), "aaaab", "aa"),
        (("abc", "b"), "xabc", "xa"),  # the first that is complete, however the text was cut
        (("END", "ND"), "an END", "an "),  # complete at once: the longer
        (("中文",), "a中中文b", "a中"),
        ((), "all of it", "all of it"),
        (("stop",), "sto", "sto"),
    ],
)
def test_a_stop_string_ends_the_text_in_front_of_it_wherever_it_is_cut(stops, text, given, size):
    assert by_character(stops, text, size) == (given, given != text)


def test_no_more_is_held_back_than_may_be_a_stop_string():
    stops = Stops(("</s>", "<end>"))
    assert [stops.push(piece) for piece in ("a", "<", "e", "x", "<", "/", "s")] == ["a", "", "", "<ex", "", "", ""]
    assert stops.rest() == "</s"


def test_a_checkpoints_tokenizer_is_read_with_its_ends_and_its_template(tmp_path):
    text = Text.load(folder(tmp_path / "one"))
    assert text.ends == {END} and text.encode("hé") == tuple("hé".encode()) and text.encode("") == (END,)
    told = text.conversation([{"role": "user", "content": "hi"}])
    assert text.decode(told) == "<user>hi<assistant>"
    with pytest.raises(ValueError, match="chat template refuses: who asked"):
        text.conversation([{"role": "assistant", "content": "hi"}])


def test_without_a_template_there_is_no_chat(tmp_path):
    text = Text.load(folder(tmp_path / "one", template=None))
    with pytest.raises(ValueError, match="no chat template, so it answers completions alone"):
        text.conversation([{"role": "user", "content": "hi"}])


def test_the_ends_of_the_generation_config_are_ends_too(tmp_path):
    (folder(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [10, 256]}')
    assert load_vocabulary(tmp_path).ends == {10, 256}


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            load_vocabulary(path)


def test_a_token_by_itself_has_its_bytes():
    text = byte_text()
    assert (
        text.piece(65) == ("A", (65,))
        and text.piece(0xE4) == (TORN, (0xE4,))
        and text.piece(END) == ("<|eot|>", tuple(b"<|eot|>"))
    )
