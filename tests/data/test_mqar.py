"""Multi-query associative recall: a query repeats a key, its label is the value, and small powers ask soon."""

import pytest
import torch

from needlework.data import MQAR

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("make", [MQAR.batch, lambda task, *of: task.drawn(CPU, *of)], ids=["on the host", "on a device"])


@BOTH
def test_every_mqar_query_repeats_a_key_and_its_label_is_the_value(make):
    task = MQAR(vocab=128, pairs=6)
    for inputs, labels in zip(*make(task, 0, 0, 20, 64), strict=True):
        pairs = dict(zip(inputs[:12:2].tolist(), inputs[1:12:2].tolist(), strict=True))
        asked = torch.nonzero(labels >= 0)[:, 0].tolist()
        assert len(pairs) == len(asked) == 6
        assert {inputs[t].item(): labels[t].item() for t in asked} == pairs
        assert sum(t in pairs for t in inputs.tolist()) == 12  # a key is in its pair and its query only
        assert max(pairs) < 64 <= min(pairs.values())


@BOTH
def test_mqar_asks_soon_when_the_power_is_small(make):
    near, far = (
        torch.nonzero(make(MQAR(pairs=4, power=power), 0, 0, 200, 256).labels >= 0)[:, 1].float().mean()
        for power in (0.01, 1.0)
    )
    # power 1 is uniform over 8, 10 … 254: mean 131, standard deviation 71, 800 draws
    assert abs(far - 131) < 4 * 71 / 800**0.5
    assert near < far / 2


def test_what_is_drawn_on_a_device_has_the_hosts_distribution():
    """The key of the first pair is asked soonest: shares of its first gaps, and of the tokens that are no key, of 4,000 rows each."""
    task = MQAR(vocab=32, pairs=3, power=0.3)
    rows = [(b.input_ids, b.labels) for b in (task.batch(0, 0, 4000, 24), task.drawn(CPU, 0, 0, 4000, 24))]
    shares = []
    for inputs, labels in rows:
        asks_first = (inputs == inputs[:, :1]) & (labels >= 0)
        gaps = asks_first.float().argmax(1)
        filler = inputs[:, 7::2][labels[:, 7::2] < 0]
        shares.append(
            torch.cat([torch.bincount(gaps, minlength=24) / 4000, torch.bincount(filler, minlength=32) / len(filler)])
        )
    assert (shares[0] - shares[1]).abs().max() < 4 * (2 * 0.25 / 4000) ** 0.5


def test_what_is_drawn_is_a_function_of_seed_and_step():
    one, again, step, seed = (MQAR().drawn(CPU, *of, 4, 64).input_ids for of in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert torch.equal(one, again) and not torch.equal(one, step) and not torch.equal(one, seed)


@BOTH
def test_mqar_that_does_not_fit_is_refused(make):
    with pytest.raises(ValueError, match="need T >= 32, got T = 31"):
        make(MQAR(), 0, 0, 1, 31)
    with pytest.raises(ValueError, match="pairs < vocab / 2"):
        MQAR(vocab=16, pairs=8)
    assert make(MQAR(vocab=18, pairs=8), 0, 0, 1, 32)[0].shape == (1, 32)
