"""The induction needle: the literal form of arXiv 2606.25156, scored at its digits."""

import re

import pytest
import torch

from needlework.data import CorpusConfig, decode_bytes, induction_needle, load_corpus


def test_the_induction_needle_is_the_papers_and_its_digits_are_scored(corpus):
    distance = 500
    episodes = induction_needle(corpus, 0, 16, distance)
    held_out = decode_bytes(corpus.held_out.tokens)
    form = re.compile(rb"^( The access code for record \d{7} is)((?: \d){5})(.*)\1\2$", re.DOTALL)
    for inputs, targets in zip(*episodes, strict=True):
        match = form.match(decode_bytes(torch.cat([inputs, targets[-1:]])))
        assert inputs[0] == 256
        assert len(match[3]) == distance and match[3] in held_out
        assert torch.equal(inputs[1:][targets[:-1] >= 0], targets[:-1][targets[:-1] >= 0])
        assert decode_bytes(targets[targets >= 0]) == match[2].replace(b" ", b"")


def test_the_absent_needle_leaves_length_and_targets_but_not_the_answer(corpus):
    present, absent = (induction_needle(corpus, 0, 4, 300, present=present) for present in (True, False))
    assert present.input_ids.shape == absent.input_ids.shape
    assert torch.equal(present.targets, absent.targets)
    for row in absent.input_ids:
        assert decode_bytes(row).count(b"The access code") == 1


def test_a_filler_longer_than_every_document_names_the_longest(corpus):
    with pytest.raises(ValueError, match=r"the filler is 1000\d+ tokens of one held-out document, but the longest has"):
        induction_needle(corpus, 0, 1, 10**6)


def test_one_digit_is_one_target_in_any_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    digits = [f" {d} {d}" for d in range(10)] * 10  # " 7" becomes a token, as in the large vocabularies
    lines = [path.read_text() for path in folder.iterdir()]
    bpe.train_from_iterator(digits + lines, trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))
    corpus = load_corpus(CorpusConfig(kind="files", paths=(folder,), held_out=0.2), bpe)
    for inputs, targets in zip(*induction_needle(corpus, 0, 8, 50), strict=True):
        value = bpe.decode(targets[targets >= 0].tolist())
        assert re.fullmatch(r"( \d){5}", value)
        text = bpe.decode([*inputs.tolist(), int(targets[-1])])
        assert text.endswith(f" is{value}") and text.count(value) == 2
