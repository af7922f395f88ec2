"""Selective Key Overwrite: the expected values are what a dictionary would hold at the end of the stream."""

import pytest
import torch

from needlework.data import SelectiveKeyOverwrite, squared_error


def test_selective_key_overwrite_expects_the_last_value_of_every_key():
    task = SelectiveKeyOverwrite(K=16, V=8, keys=(4, 12))
    for step in range(5):
        stream = task.batch(0, step, 3, 128)
        for k, v, overwrite, keys, values in zip(*stream, strict=True):
            memory = {}
            for key, value, flag in zip(k.tolist(), v.tolist(), overwrite.tolist(), strict=True):
                known = memory.get(tuple(key))
                assert (known is not None and known != value) if flag else known in (None, value)
                memory[tuple(key)] = value
            assert overwrite.sum() == 32
            assert len(memory) == len(keys)
            assert [memory[tuple(key)] for key in keys.tolist()] == values.tolist()
        torch.testing.assert_close(stream.keys.norm(dim=-1), torch.ones(stream.keys.shape[:2]))


def test_the_delta_rule_with_one_key_overwrites_it_exactly():
    stream = SelectiveKeyOverwrite(keys=(1, 1)).batch(0, 0, 2)
    state = torch.zeros(2, 64, 64)
    for k, v in zip(stream.k.unbind(1), stream.v.unbind(1), strict=True):
        state = state + torch.einsum("bk,bv->bkv", k, v - torch.einsum("bkv,bk->bv", state, k))
    answers = torch.einsum("bkv,bnk->bnv", state, stream.keys)
    assert squared_error(answers, stream.values) < 1e-10  # float32: (a few roundings of numbers near 1)²
    # values are N(0, 1): an answer of zeros has error 1, here the mean of 128 squares
    assert abs(squared_error(torch.zeros_like(answers), stream.values) - 1) < 4 * (2 / 128) ** 0.5


def test_the_number_of_keys_is_drawn_per_batch_from_its_range():
    counts = {SelectiveKeyOverwrite(keys=(2, 4)).batch(0, step, 1, 16).keys.shape[1] for step in range(30)}
    assert counts == {2, 3, 4}


def test_selective_key_overwrite_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="64 keys and 16 overwrites need a longer stream than T = 64"):
        SelectiveKeyOverwrite().batch(0, 0, 1, 64)
    with pytest.raises(ValueError, match="keys"):
        SelectiveKeyOverwrite(keys=(5, 4))
    with pytest.raises(ValueError, match="expected shape"):
        squared_error(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))
