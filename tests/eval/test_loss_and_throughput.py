"""Loss is the cross entropy of the next token, and throughput counts tokens."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from needlework.eval import loss, throughput

IDS = torch.randint(11, (5, 33), generator=torch.Generator().manual_seed(0))


def bigram():
    torch.manual_seed(0)
    return nn.Embedding(11, 11)


def test_loss_is_the_cross_entropy_of_the_next_token():
    model = bigram()
    with torch.no_grad():
        expected = F.cross_entropy(model(IDS)[:, :-1].reshape(-1, 11).double(), IDS[:, 1:].flatten())
    assert loss(model, IDS, batch_size=2).mean == pytest.approx(expected.item(), rel=1e-6)


def test_uniform_logits_cost_the_log_of_the_vocabulary():
    uniform = lambda ids: SimpleNamespace(logits=torch.zeros(*ids.shape, 256))
    found = loss(uniform, IDS, buckets=4)
    assert found.mean == pytest.approx(math.log(256), rel=1e-6)
    assert found.by_position == pytest.approx([math.log(256)] * 4, rel=1e-6)


def test_buckets_follow_the_positions():
    # Certain of the next token in the first half of the row, uniform in the second.
    def model(ids):
        next_ids = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        scores = 1000.0 * F.one_hot(next_ids, 11)
        scores[:, 16:] = 0
        return scores

    assert loss(model, IDS, buckets=2).by_position == pytest.approx([0, math.log(11)])
    assert loss(model, IDS, buckets=(8, 16)).by_position == pytest.approx([0, 0, math.log(11)])


def test_buckets_are_never_more_than_positions():
    assert len(loss(bigram(), IDS[:, :4], buckets=8).by_position) == 3


def test_one_token_predicts_nothing_and_is_an_error():
    with pytest.raises(ValueError, match="T >= 2"):
        loss(bigram(), IDS[:, :1])


def test_throughput_is_tokens_over_the_median_time(monkeypatch):
    clock = iter([0, 100, 0, 1, 0, 2, 0, 50])  # the first pass warms up and is not counted
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert throughput(bigram(), IDS, repetitions=3) == IDS.numel() / 2


def test_one_repetition_is_enough_for_throughput():
    assert throughput(bigram(), IDS, repetitions=1) > 0


def test_throughput_of_no_repetition_is_an_error():
    with pytest.raises(ValueError, match="repetitions"):
        throughput(bigram(), IDS, repetitions=0)
