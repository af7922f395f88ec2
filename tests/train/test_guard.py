"""A step that must not be taken is found, named and, if so wished, passed over without a trace in the weights."""

import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from needlework.layers.state import Peak
from needlework.train import GrowingState, Guard, NonFiniteLoss, Spike, latest, train
from needlework.train.guard import Watch

from .tiny import CONFIG, VOCABULARY, Tiny, batch, equal, lines, stop_at

BAD = VOCABULARY - 1  # the token that spoils what it touches
PLAIN = replace(CONFIG, accumulate=1)


def sound(index):
    b = batch(index)
    return SimpleNamespace(input_ids=b.input_ids.clamp(max=BAD - 1), labels=b.labels)


def spoiling(*indices):
    def of(index):
        b = sound(index)
        if index in indices:
            b.input_ids[2, 1] = BAD
        return b

    return of


class Fragile(Tiny):
    """Its first block's output is not finite after the bad token."""

    def __init__(self):
        super().__init__(dropout=0.0)
        with torch.no_grad():
            self.embed.weight[BAD] = 3e38
            self.blocks[0].weight[0] = 2.0


class Leaping(Tiny):
    """Its logits, and so its loss, are large after the bad token."""

    def __init__(self):
        super().__init__(dropout=0.0)

    def forward(self, input_ids):
        factor = torch.where(input_ids == BAD, 1e4, 1.0)
        return super().forward(input_ids) * factor[..., None]


def test_the_module_the_batch_and_the_parameter_are_named(tmp_path):
    with pytest.raises(NonFiniteLoss) as caught:
        train(Fragile(), spoiling(9), CONFIG, tmp_path)
    said = str(caught.value)
    assert said.startswith("step 5: loss nan") or said.startswith("step 5: loss inf")
    for part in (
        "batch 9 has the loss",
        "the first output that is not finite, on batch 9, is that of blocks.0",
        "not finite: the gradient of",
    ):
        assert part in said
    assert caught.value.step == 5 and caught.value.last.name == "step-00000003"
    assert str(pickle.loads(pickle.dumps(caught.value))) == said


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("which", (0, 1))
def test_what_is_not_finite_is_no_spike(value, which):
    numbers = [1.0, 1.0]
    numbers[which] = value
    kind, said = Watch(Guard()).verdict(*numbers)
    assert kind is NonFiniteLoss and said == f"the {('loss', 'gradient norm')[which]} is {value}"


@pytest.mark.parametrize("which", (0, 1))
def test_a_spike_is_over_so_many_times_the_median_of_its_own_kind(which):
    usual, limit = ((8.0, 0.5), (24.0, 1.5))
    watch = Watch(Guard(spike=3, window=3, skip=9))
    for step in (-1, 0, 1):
        assert watch.verdict(usual[0] + step, usual[1] + step / 8) is None
    numbers = list(usual)
    numbers[which] = limit[which] * 1.01
    kind, said = watch.verdict(*numbers)
    assert kind is Spike and said.startswith(f"the {('loss', 'gradient norm')[which]} is 3.03 × its running median")
    numbers[which] = limit[which] * 0.99
    assert watch.verdict(*numbers) is None


def test_looking_for_the_module_leaves_no_hook_and_no_random_number_behind(tmp_path):
    model, plain = Fragile(), Tiny()
    model.dropout.p = plain.dropout.p = 0.1
    states = []
    config = replace(PLAIN, guard=Guard(skip=1))
    train(model, spoiling(2), config, tmp_path / "a", on_step=lambda p: states.append(torch.get_rng_state()), stop=stop_at(3))
    train(plain, sound, config, tmp_path / "b", on_step=lambda p: states.append(torch.get_rng_state()), stop=stop_at(3))
    assert all(torch.equal(a, b) for a, b in zip(states[:3], states[3:], strict=True))
    assert not any(m._forward_hooks for m in model.modules())


def test_a_skipped_step_leaves_weights_and_moments_as_they_were_and_is_logged(tmp_path):
    """What follows is what follows from the step before it."""
    skipped, before = Fragile(), Fragile()
    config = replace(PLAIN, guard=Guard(skip=2))
    result = train(skipped, spoiling(3, 4), config, tmp_path / "a", stop=stop_at(5))
    train(before, spoiling(), config, tmp_path / "b", stop=stop_at(3))
    assert equal(skipped, before)
    assert result.skipped == (4, 5) and not any(math.isfinite(x) for x in result.losses[3:])
    record = lines(tmp_path / "a")[4]
    assert record["loss"] is None and "batch 4" in record["skipped"] and "blocks.0" in record["skipped"]
    assert "skipped" not in lines(tmp_path / "a")[2]


def test_one_bad_step_more_than_may_be_skipped_ends_the_run(tmp_path):
    config = replace(PLAIN, guard=Guard(skip=2))
    with pytest.raises(NonFiniteLoss, match="step 6"):
        train(Fragile(), spoiling(3, 4, 5), config, tmp_path / "three")
    assert train(Fragile(), spoiling(3, 4, 6, 7), config, tmp_path / "two and two").skipped == (4, 5, 7, 8)


def test_a_run_that_is_resumed_counts_the_skipped_steps_before_it(tmp_path):
    config = replace(PLAIN, guard=Guard(skip=2))
    assert train(Fragile(), spoiling(3, 4, 5), config, tmp_path, stop=stop_at(5)).skipped == (4, 5)
    with pytest.raises(NonFiniteLoss, match="step 6"):
        train(Fragile(), spoiling(3, 4, 5), config, tmp_path)


def test_a_spike_of_the_loss_is_caught_and_named(tmp_path):
    config = replace(PLAIN, guard=Guard(spike=3.0, window=4))
    with pytest.raises(Spike, match=r"step 7: .*the loss is .* × its running median .*batch 6 has the largest loss") as caught:
        train(Leaping(), spoiling(6), config, tmp_path)
    assert math.isfinite(caught.value.loss)
    with pytest.raises(Spike, match="step 7"):  # the medians are of the whole run
        train(Leaping(), spoiling(6), config, tmp_path)


def test_a_spike_of_the_gradient_is_caught_and_names_the_parameter(tmp_path):
    class Steep(Tiny):
        def forward(self, input_ids):
            logits = super().forward(input_ids)
            return logits + torch.where(input_ids == BAD, 1e3, 0.0)[..., None] * (logits - logits.detach())

    with pytest.raises(Spike, match=r"the gradient norm is .*the largest: the gradient of \w+"):
        train(Steep(dropout=0.0), spoiling(6), replace(PLAIN, guard=Guard(spike=5.0, window=4)), tmp_path)


def test_no_step_is_a_spike_before_the_window_is_full_nor_one_that_is_as_large_as_usual(tmp_path):
    config = replace(PLAIN, guard=Guard(spike=3.0, window=8))
    assert train(Leaping(), spoiling(6), config, tmp_path / "early").skipped == ()
    assert train(Leaping(), sound, replace(config, guard=Guard(spike=3.0, window=2)), tmp_path / "sound").skipped == ()


def test_a_spike_does_not_move_the_median(tmp_path):
    config = replace(PLAIN, guard=Guard(spike=3.0, window=2, skip=9))
    assert train(Leaping(), spoiling(4, 5, 6, 7, 8), config, tmp_path).skipped == (5, 6, 7, 8, 9)


def test_the_last_good_checkpoint_is_whole_when_it_is_named(tmp_path):
    with pytest.raises(NonFiniteLoss) as caught:
        train(Fragile(), spoiling(3), PLAIN, tmp_path)
    assert caught.value.last == latest(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"spike": 1.0}, {"spike": math.nan}, {"spike": math.inf}, {"window": 0}, {"window": 1.5}, {"skip": -1}]
)
def test_a_guard_that_makes_no_sense_is_refused(settings):
    with pytest.raises(ValueError, match=f"guard.*{next(iter(settings.values()))}"):
        Guard(**settings)


def test_the_gradient_of_one_loss_alone_may_be_at_fault(tmp_path):
    class Cusp(nn.Module):
        """Finite outputs everywhere; a slope that is not, at one place."""

        def __init__(self):
            super().__init__()
            self.inner = Tiny(dropout=0.0)

        def forward(self, input_ids):
            logits = self.inner(input_ids)
            return logits + (logits - logits.detach()).abs().sqrt() if (input_ids == BAD).any() else logits

    with pytest.raises(NonFiniteLoss) as caught:
        train(Cusp(), spoiling(1), PLAIN, tmp_path)
    assert "the gradient norm is nan" in str(caught.value) and "output" not in str(caught.value)
    assert "not finite: the gradient of inner." in str(caught.value)


class Growing:
    """States of two layers; the second's has the norm of the call's number."""

    def __init__(self):
        self.calls = []

    def __call__(self, model, input_ids):
        torch.rand(3)  # a look may draw: the run's generator is as it was
        self.calls.append(len(input_ids))
        return [Peak("blocks.0", "S", 0.5, 0, 6), Peak("blocks.1", "S", float(len(self.calls)), 2, 3)]


LOOKING = replace(PLAIN, guard=Guard(state=3.5, state_every=2))


def test_the_largest_state_is_logged_and_one_over_the_bound_ends_the_run_by_name(tmp_path):
    with pytest.raises(GrowingState) as caught:
        train(Tiny(), batch, LOOKING, tmp_path, states=Growing())
    said = str(caught.value)
    assert said.startswith(
        "step 7: the state S of blocks.1 has the norm 4 after 3 tokens of row 2, more than 3.5, on batch 6; stopped"
    )
    assert caught.value.step == 7 and caught.value.last.name == "step-00000006"
    assert str(pickle.loads(pickle.dumps(caught.value))) == said
    logged = [(line.get("state"), line.get("state_of")) for line in lines(tmp_path)]
    assert logged == [(1.0, "blocks.1"), (None, None), (2.0, "blocks.1"), (None, None), (3.0, "blocks.1"), (None, None)]


def test_a_look_at_the_states_changes_no_step(tmp_path):
    looked, plain = Tiny(), Tiny()
    train(
        looked, batch, replace(LOOKING, guard=Guard(state=99, state_every=1)), tmp_path / "a", states=Growing(), stop=stop_at(4)
    )
    train(plain, batch, PLAIN, tmp_path / "b", stop=stop_at(4))
    assert equal(looked, plain)


def test_a_state_that_is_not_finite_is_over_any_bound_and_a_bad_step_names_the_state(tmp_path):
    with pytest.raises(GrowingState, match="has the norm nan"):
        train(Tiny(), batch, LOOKING, tmp_path / "a", states=lambda model, ids: [Peak("blocks.0", "S", math.nan, 0, 1)])
    with pytest.raises(
        NonFiniteLoss, match=r"the gradient of .*, the state S of blocks.1 has the norm 1 after 3 tokens of row 2"
    ):
        train(Fragile(), spoiling(3), PLAIN, tmp_path / "b", states=Growing())


def test_a_bound_that_nobody_looks_at_is_refused():
    with pytest.raises(ValueError, match="guard: state is 5 and state_every is None, expected a number of steps"):
        Guard(state=5)
