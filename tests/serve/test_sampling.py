"""The next token: the distribution that was asked for, the same draw in any batch, filters and penalties as their words say."""

import math

import pytest
import torch

from needlework.serve.sampling import Controls, Counts, allowed, filtered, likeliest, logprobs, penalised, sample

V = 50


def controls(R, **given):
    settings = {
        "temperature": 1.0, "top_k": V, "top_p": 1.0, "min_p": 0.0, "seed": 0, "counter": 0,
        "presence": 0.0, "frequency": 0.0, "repetition": 1.0, "slots": torch.arange(R),
    } | given  # fmt: skip
    column = lambda x: x if isinstance(x, torch.Tensor) else torch.full((R,), x)
    return Controls(**{name: column(x) for name, x in settings.items()})


def logits(R, seed=0):
    return 2 * torch.randn(R, V, generator=torch.Generator().manual_seed(seed))


def chi_square(tokens, p):
    """Of the counts against p; its mean is the number of outcomes − 1, its deviation √(2 · that)."""
    kept = p > 0
    assert not torch.bincount(tokens, minlength=V)[~kept].any()
    counts, expected = torch.bincount(tokens, minlength=V)[kept], p[kept] * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("varied", ["seed", "counter"])
def test_draws_follow_the_distribution(given, varied):
    R, x = 20_000, logits(1) / 2
    asked = controls(R, **given, **{varied: torch.arange(R)})
    p = filtered(x / given.get("temperature", 1.0), controls(1, **given)).softmax(-1)[0]
    found, degrees = chi_square(sample(x.expand(R, V), asked), p)
    assert degrees > 3 and found < degrees + 5 * math.sqrt(2 * degrees)


def test_a_request_draws_the_same_in_any_batch_and_slot():
    x, seeds = logits(8), torch.arange(8) * 12345
    whole = sample(x, controls(8, seed=seeds, counter=torch.arange(8)))
    for i in (0, 5, 7):
        alone = sample(x[i : i + 1], controls(1, seed=seeds[i : i + 1], counter=torch.tensor([i]), slots=torch.tensor([3])))
        assert alone[0] == whole[i]


def test_neighbouring_tokens_seeds_and_counters_draw_independently():
    R = 20_000
    x = torch.zeros(R, V)
    first = sample(x, controls(R, counter=torch.arange(R)))
    for other in ({"counter": torch.arange(R) + 1}, {"seed": 1, "counter": torch.arange(R)}):
        same = float((sample(x, controls(R, **other)) == first).float().mean())
        assert abs(same - 1 / V) < 5 * math.sqrt(1 / V / R)
    for lag in (1, 2):
        same = float((first[lag:] == first[:-lag]).float().mean())
        assert abs(same - 1 / V) < 5 * math.sqrt(1 / V / R)


def test_temperature_zero_is_the_largest_beside_rows_that_draw():
    x = logits(6)
    temperature = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    found = sample(x, controls(6, temperature=temperature, seed=torch.arange(6)))
    assert torch.equal(found[::2], x.argmax(-1)[::2])


def test_filters_keep_what_they_say():
    x = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()
    kept = lambda **given: int(filtered(x, controls(1, top_k=given.pop("top_k", 5), **given)).isfinite().sum())
    assert kept() == 5 and kept(top_k=1) == 1 and kept(top_k=2) == 2
    assert kept(top_p=0.5) == 1 and kept(top_p=0.51) == 2 and kept(top_p=1e-6) == 1
    assert kept(min_p=0.5) == 2 and kept(min_p=0.51) == 1 and kept(min_p=1.0) == 1
    assert kept(top_k=3, top_p=0.5) == 1, "the narrowest decides"
    assert kept(top_k=4) == 5, "a tie with the last is kept"


def test_penalties_are_of_the_requests_own_tokens():
    x = torch.tensor([[2.0, -2.0, 1.0, 1.0]]).expand(2, 4)
    counts = Counts.zeros(3, 4)
    counts.prompt[2, 3] = True
    for _ in range(2):
        counts.add(torch.tensor([0, 1]), torch.tensor([2, 2]))
    counts.add(torch.tensor([2]), torch.tensor([-1]))  # a padded row
    assert int(counts.drawn.sum()) == 4 and not counts.drawn[0].any()
    asked = controls(2, presence=0.5, frequency=0.25, repetition=2.0, slots=torch.tensor([2, 1]))
    found = penalised(x, asked, counts)
    assert torch.equal(found[0], torch.tensor([1.0 - 1.0, -4.0 - 1.0, 1.0, 0.5])) and torch.equal(found[1], x[1])


def test_a_token_may_be_drawn_as_often_as_a_long_answer_has_tokens():
    counts, often = Counts.zeros(1, 4), 40_000
    counts.add(torch.full((often,), 2), torch.zeros(often, dtype=torch.int64))
    assert counts.drawn.tolist() == [[0, 0, often, 0]]


def test_a_bitmask_forbids_what_it_does_not_name():
    x, open_to = logits(2), [{0, 31, 32, 49}, {7}]
    bits = torch.zeros(2, 2, dtype=torch.int32)
    for row, tokens in enumerate(open_to):
        for token in tokens:
            bits[row, token // 32] |= torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32)
    found = allowed(x, bits)
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in found] == open_to
    assert sample(x, controls(2), bits=bits)[1] == 7


def test_logprobs_are_the_models_own():
    x = logits(3)
    own, which, best = logprobs(x, torch.tensor([1, 2, 3]), 4)
    expected = x.log_softmax(-1)
    assert torch.allclose(own, expected[range(3), [1, 2, 3]]) and torch.equal(which[:, 0], x.argmax(-1))
    assert torch.equal(best, expected.gather(-1, which)) and (best.diff() <= 0).all()


def test_the_likeliest_of_parts_is_the_first_largest():
    x = torch.randint(100, (50, 320), generator=torch.Generator().manual_seed(0)).float()  # in any part, and often twice
    x[0] = float("-inf")
    assert torch.equal(likeliest(x), x.argmax(-1)) and torch.equal(likeliest(x[:, :-1]), x[:, :-1].argmax(-1))
