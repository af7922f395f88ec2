"""What makes resume exact: a batch is a function of seed and step, a row of its own number."""

import zlib

import pytest
import torch

from needlework.data import MQAR, NeedleMix, SelectiveKeyOverwrite, windows
from needlework.data.needles import many_needles, single_needle
from needlework.data.packing import held_out_text


@pytest.mark.parametrize("T", [43, 128, 256, 300])
@pytest.mark.parametrize(
    "make",
    [
        lambda corpus, seed, step, B, T: NeedleMix().batch(corpus, seed, step, B, T),
        lambda corpus, seed, step, B, T: MQAR(pairs=4).batch(seed, step, B, T),
        lambda corpus, seed, step, B, T: SelectiveKeyOverwrite(K=4, V=4, keys=(2, 5)).batch(seed, step, B, T),
    ],
    ids=["needles", "mqar", "overwrite"],
)
def test_a_batch_is_a_function_of_seed_and_step_and_a_row_of_its_number(corpus, make, T):
    batch = make(corpus, 7, 3, 6, T)
    for a, b, few in zip(batch, make(corpus, 7, 3, 6, T), make(corpus, 7, 3, 2, T), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:2], few)
    assert not torch.equal(batch[0], make(corpus, 7, 4, 6, T)[0])
    assert not torch.equal(batch[0], make(corpus, 8, 3, 6, T)[0])


def test_no_rows_and_no_tokens_are_refused(corpus):
    with pytest.raises(ValueError, match="got B = 0"):
        windows(corpus, 0, 0, 0, 8)
    with pytest.raises(ValueError, match="got B = 2, T = 0"):
        windows(corpus, 0, 0, 2, 0)
    assert windows(corpus, 0, 0, 1, 1)[0].shape == (1, 1)


@pytest.mark.parametrize(
    ("draw", "bits"),
    [
        (lambda corpus: held_out_text(corpus, 0, 4, 32), 512198056),
        (lambda corpus: single_needle(corpus, 0, 4, 64), 2291698634),
        (lambda corpus: many_needles(corpus, 0, 4, 128), 3487746956),
        (lambda corpus: MQAR(pairs=4).batch(0, 0, 4, 64), 569810677),
    ],
    ids=["text", "single", "many", "mqar"],
)
def test_what_is_measured_is_drawn_as_before(corpus, draw, bits):
    """Figures of two versions would be of two sets."""
    assert zlib.crc32(b"".join(x.numpy().tobytes() for x in draw(corpus))) == bits
