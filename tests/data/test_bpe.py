"""A trained vocabulary: all bytes, lone digits, the same file for the same text, and needles that still work in it."""

import numpy as np
import pytest
import torch

from needlework.data import (
    MULTI_KEY,
    MULTI_NEEDLE,
    NUMBER,
    PASSKEY,
    UUID,
    CorpusConfig,
    NeedleMix,
    eot_id,
    induction_needle,
    load_corpus,
    many_needles,
    single_needle,
    train_tokenizer,
)
from needlework.data.tokenizer import byte_ids, encode, encode_documents

TEXTS = [f"def needle_{i}(hay):\n    return hay.find({i * 7919})  # naïve 🪡\n" for i in range(300)]


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(TEXTS, 280)


@pytest.fixture(scope="module")
def bpe_corpus(folder, bpe):
    return load_corpus(CorpusConfig(kind="files", paths=(folder,), held_out=0.2), bpe)


def test_every_byte_is_a_token_and_end_of_text_is_0(bpe):
    assert bpe.get_vocab_size() == 280
    assert len(set(byte_ids(bpe).tolist())) == 256
    assert eot_id(bpe) == 0


def test_any_text_comes_back(bpe):
    for text in ("".join(map(chr, range(0x300))), " a\t\tb \r\n\n", "日本語 🪡 ²½٣", TEXTS[7]):
        assert bpe.decode(encode(bpe, text).tolist()) == text


def test_no_token_holds_two_digits_or_a_digit_and_something_else(bpe):
    tempting = train_tokenizer([f"7km {i}7km x77 km77\n" for i in range(99)], 400)
    assert {"km", "Ġx"} <= tempting.get_vocab().keys()
    for vocabulary in (bpe.get_vocab(), tempting.get_vocab()):
        assert [token for token in vocabulary if len(token) > 1 and any(c in "0123456789" for c in token)] == []
    assert len(encode(bpe, "1234567")) == 7
    assert {"Ġhay", "find"} & bpe.get_vocab().keys()  # it has learned words


def test_the_same_texts_give_the_same_file_and_others_another(bpe):
    assert train_tokenizer(iter(TEXTS), 280).to_str() == bpe.to_str()
    assert train_tokenizer([text.upper() for text in TEXTS], 280).to_str() != bpe.to_str()


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 257, got 256"):
        train_tokenizer(TEXTS, 256)
    assert train_tokenizer(TEXTS, 257).get_vocab_size() == 257


def test_the_name_of_the_end_of_text_in_a_document_is_text(bpe):
    (ids,) = encode_documents(bpe, ["a<|eot|>b"])
    assert 0 not in ids and bpe.decode(ids.tolist()) == "a<|eot|>b"
    assert ids.dtype == np.uint16
    assert bpe.encode("<|eot|>").ids == [0]  # and the tokenizer is what it was


def test_compact_needles_stand_in_bpe_text_as_eleven_bytes(bpe_corpus):
    value, order = bpe_corpus.byte_ids, {int(t): b for b, t in enumerate(bpe_corpus.byte_ids)}
    episodes = many_needles(bpe_corpus, 0, 6, 300, 3)
    assert episodes.input_ids.shape == (6, 300)
    for inputs, targets in zip(*episodes, strict=True):
        answer = bytes(order[int(t)] for t in targets[targets >= 0])
        row = inputs.tolist()
        for i in range(3):
            needle = [*value[list(b"=")], *value[list(answer[4 * i : 4 * i + 4])], value[ord("\n")]]
            places = [j for j in range(len(row)) if row[j : j + 6] == needle]
            assert len(places) >= 1 and places[0] < 300 - 33


@pytest.mark.parametrize("T", [256, 600])
def test_training_rows_ask_what_stands_before(bpe_corpus, T):
    newline, hash_, at, equals = (int(bpe_corpus.byte_ids[b]) for b in b"\n#@=")
    for task in (NeedleMix(dense=1, sparse=0), NeedleMix(dense=0, sparse=1)):
        batch = task.batch(bpe_corpus, 0, 0, 16, T)
        for inputs, labels in zip(*batch, strict=True):
            row = [*inputs.tolist(), int(labels[-1])]
            starts = [i for i in range(len(row) - 10) if row[i : i + 3] == [newline, hash_, at] and row[i + 5] == equals]
            pairs = [(tuple(row[i + 3 : i + 5]), tuple(row[i + 6 : i + 10])) for i in starts]
            assert len(pairs) > len(dict(pairs)) >= 1  # every key has one value, and keys come again
            assert set(pairs) == set(dict(pairs).items())


@pytest.mark.parametrize("task", [PASSKEY, NUMBER, UUID, MULTI_KEY, MULTI_NEEDLE])
def test_ruler_in_bpe_scores_its_answers(bpe_corpus, task):
    T = 900
    result = task.episodes(bpe_corpus, 0, 4, T)
    decode = lambda ids: bpe_corpus.tokenizer.decode(ids.tolist())
    for inputs, targets, answers in zip(*result.episodes, result.answers, strict=True):
        assert decode(targets[targets >= 0]).split() == list(answers)
        assert all(f"is {answer}." in decode(inputs) for answer in answers)


def test_induction_digits_in_bpe_are_one_target_each(bpe_corpus):
    for inputs, targets in zip(*induction_needle(bpe_corpus, 0, 4, 100), strict=True):
        assert int((targets >= 0).sum()) == 5
        value = bpe_corpus.tokenizer.decode(targets[targets >= 0].tolist())
        assert bpe_corpus.tokenizer.decode(inputs.tolist()).count(" " + " ".join(value)[:7]) == 2
    assert torch.equal(single_needle(bpe_corpus, 0, 2, 100)[0], single_needle(bpe_corpus, 0, 2, 100)[0])
