"""The gate of a warm-up: when it is passed, what is trained on after it, and that a resumed run passes it at the same step."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from needlework.data import ASKED, PAIRED, NeedleMix, RecallMix, Text
from needlework.experiment.gate import Gate, Gatekeeper, answer_nats, excess
from needlework.experiment.recipe import build, text
from needlework.experiment.runner import Evaluation, Phase, Recipe, run
from needlework.json_file import read_json
from needlework.recipes import demo
from needlework.train import AdamW, Cooldown, Progress, TrainConfig, logged

WARM = RecallMix(dense=1.0, sparse=0.0, dense_pairs=(1, 2))
AFTER = RecallMix(dense=0.25, sparse=0.5, dense_pairs=(1, 2), sparse_pairs=(1, 1))
GATE = Gate(excess=0.5, window=3)


def step(n, *nats, count=10):
    """A step's progress whose paired digits have `nats` each; none where there are none."""
    extra = {"paired_nats": nats[0] * count, "paired": count} if nats else {"paired_nats": 0.0, "paired": 0}
    return Progress(step=n, steps=99, loss=1.0, tokens=0, seconds=0.0, tokens_per_second=1.0, extra=extra)


def test_it_is_passed_after_so_many_steps_in_a_row_whose_mean_is_below(tmp_path):
    keeper = Gatekeeper(GATE, tmp_path)
    for n, nats in enumerate((0.9, 0.3, 0.31, 0.9, 0.4, 0.1), 1):
        keeper.note(step(n, nats))
        assert keeper.passed == (6 if n == 6 else None)
    keeper.note(step(7, 9.0))  # it stays passed
    assert keeper.passed == 6 and read_json(tmp_path / "gate.json") == {"step": 6}
    assert Gatekeeper(GATE, tmp_path).passed == 6


def test_a_step_without_paired_digits_and_one_that_is_not_finite_break_the_row(tmp_path):
    keeper = Gatekeeper(GATE, tmp_path)
    for n, nats in enumerate(((0.1,), (0.1,), (), (0.1,), (math.nan,), (0.1,), (0.1,), (0.1,)), 1):
        keeper.note(step(n, *nats))
    assert keeper.passed == 8 and excess({"paired_nats": None, "paired": 3}) is None


def test_without_a_gate_nothing_is_passed_and_nothing_written(tmp_path):
    keeper = Gatekeeper(None, tmp_path)
    keeper.note(step(1, 0.0))
    assert keeper.passed is None and not list(tmp_path.iterdir())


def test_the_nats_of_each_kind_of_answer_are_summed_and_counted():
    nats = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    answers = torch.tensor([[PAIRED, 0, ASKED], [0, PAIRED, ASKED]], dtype=torch.int8)
    found = {name: value.item() for name, value in answer_nats(nats, answers).items()}
    assert found == {"paired_nats": 17.0, "paired": 2, "asked_nats": 36.0, "asked": 2}
    assert excess(found) == 8.5


def gated(corpus, **changes):
    """Bytes have 257 tokens: the excess falls below 5.45 nats within a few steps."""
    recipe = demo.recipe("gated-deltanet", corpus)
    return dataclasses.replace(
        recipe,
        phases=(
            Phase(steps=9, batch=2, length=64, task=WARM, until=Gate(excess=5.45, window=2)),
            Phase(steps=3, batch=1, length=96, task=AFTER),
        ),
        train=TrainConfig(
            steps=12, seed=0, optim=AdamW(lr=4e-3), schedule=Cooldown(warmup=2, flat=0.3, floor=0.02), checkpoint_every=3
        ),
        evaluate=Evaluation(lengths=(96,), tokens=96, rows=2, tasks=("needle",)),
        **changes,
    )


def test_the_last_phase_takes_the_steps_that_the_warm_up_leaves(small_text):
    recipe = gated(small_text)
    of = lambda passed: [recipe.phase(n, passed) is recipe.phases[1] for n in range(12)]
    assert of(None) == [False] * 9 + [True] * 3
    assert of(4) == [False] * 5 + [True] * 7  # the batch of step 5 (0 is the first) had been made when step 4 was over
    assert of(8) == of(11) == of(None)


@pytest.fixture(scope="module")
def whole(small_text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return run(gated(small_text), directory), logged(directory / "training")


def test_a_run_passes_its_gate_and_then_trains_on_the_next_phase(whole):
    entry, lines = whole
    passed = entry["gate"]["step"]
    assert 2 <= passed < 8 and entry["gate"]["most"] == 9
    means = [(a + b) / 2 for a, b in pairwise(excess(line) for line in lines[:passed])]
    assert means[-1] < 5.45 <= min(means[:-1], default=9)
    assert [line["tokens"] for line in lines] == [128 * min(n, passed + 1) + 96 * max(0, n - passed - 1) for n in range(1, 13)]


# checkpoints lie at every third step and at the stop
@pytest.mark.parametrize("after", [pytest.param(-1, marks=pytest.mark.slow), 0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_around_its_gate_passes_it_at_the_same_step(whole, small_text, tmp_path, after):
    entry, steps = whole[0], []
    stop = entry["gate"]["step"] + after
    assert run(gated(small_text), tmp_path, on_step=steps.append, stop=lambda: len(steps) == stop) is None
    again = run(gated(small_text), tmp_path)
    assert again["train"]["loss"] == entry["train"]["loss"] and again["gate"] == entry["gate"]


def test_a_gate_is_on_marked_answers_and_ends_the_first_of_several_phases(small_text):
    for task in (NeedleMix(), Text(), RecallMix()):
        with pytest.raises(ValueError, match="phase: until is a gate on dense rows with marked answers"):
            Phase(steps=1, batch=1, length=64, task=task, until=GATE)
    first, last = gated(small_text).phases
    for phases in ((dataclasses.replace(first, steps=12),), (dataclasses.replace(last, steps=3), first)):
        with pytest.raises(ValueError, match="a gate ends the first of several phases, and no other"):
            Recipe(**{f.name: getattr(gated(small_text), f.name) for f in dataclasses.fields(Recipe)} | {"phases": phases})


def test_answers_in_text_weigh_as_much_as_their_mix_says(small_text, tmp_path):
    """The loss of a step in two micro-batches: Σ e · nats / Σ e over the rows of both, e 8 for answers in text and 1 for the rest."""
    recipe = gated(small_text)
    train = dataclasses.replace(recipe.train, steps=1, accumulate=2)
    recipe = dataclasses.replace(recipe, train=train, phases=(Phase(steps=1, batch=4, length=96, task=AFTER),))
    entry = run(recipe, tmp_path / "run")
    ids, labels, answers, emphasis = AFTER.batch(text(recipe, tmp_path), 0, 0, 4, 96)
    with torch.no_grad():
        logits = build(recipe)(ids, use_cache=False).logits
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    assert set(emphasis[answers == ASKED].tolist()) == {8.0} and set(emphasis[answers != ASKED].tolist()) == {1.0}
    assert entry["train"]["loss"] == pytest.approx([((emphasis * nats).sum() / emphasis.sum()).item()], rel=1e-5)
    (line,) = logged(tmp_path / "run" / "training")
    asked = answers == ASKED
    assert 2 * line["asked"] == asked.sum() and line["asked_nats"] / line["asked"] == pytest.approx(
        nats[asked].mean().item(), rel=1e-5
    )
