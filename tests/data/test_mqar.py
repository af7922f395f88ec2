"""Multi-query associative recall: a query repeats a key, its label is the value, and small powers ask soon."""

import pytest
import torch

from needlework.data import MQAR


def test_every_mqar_query_repeats_a_key_and_its_label_is_the_value():
    task = MQAR(vocab=128, pairs=6)
    for inputs, labels in zip(*task.batch(0, 0, 20, 64), strict=True):
        pairs = dict(zip(inputs[:12:2].tolist(), inputs[1:12:2].tolist(), strict=True))
        asked = torch.nonzero(labels >= 0)[:, 0].tolist()
        assert len(pairs) == len(asked) == 6
        assert {inputs[t].item(): labels[t].item() for t in asked} == pairs
        assert sum(t in pairs for t in inputs.tolist()) == 12  # a key stands in its pair and its query only
        assert max(pairs) < 64 <= min(pairs.values())


def test_mqar_asks_soon_when_the_power_is_small():
    near, far = (
        torch.nonzero(MQAR(pairs=4, power=power).batch(0, 0, 200, 256).labels >= 0)[:, 1].float().mean()
        for power in (0.01, 1.0)
    )
    # power 1 is uniform over 8, 10 … 254: mean 131, standard deviation 71, 800 draws
    assert abs(far - 131) < 4 * 71 / 800**0.5
    assert near < far / 2


def test_mqar_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="need T >= 32, got T = 31"):
        MQAR().batch(0, 0, 1, 31)
    with pytest.raises(ValueError, match="pairs < vocab / 2"):
        MQAR(vocab=16, pairs=8)
