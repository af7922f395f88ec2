"""The second study's experiments: what was fixed before the runs, and each of them end to end in small."""

import dataclasses
import json
import math

import pytest
import torch

from needlework.data import RecallMix
from needlework.experiment.capacity import Capacity
from needlework.experiment.claim import RunError, write_json
from needlework.experiment.fork import Fork
from needlework.experiment.jobs import recipes_of, run_job
from needlework.experiment.pack import read_pack, slim, write_pack
from needlework.experiment.sweep import finished
from needlework.recipes import study
from needlework.recipes.study import base, capacity, forks, language, mixers, pilot, rates, reach, text
from needlework.report.answers import answers

JOBS = {name: module.runs() for name, module in study.EXPERIMENTS.items()}
JOBS["rates"] = tuple(rates.run(*wanted) for wanted in rates.wanted({}))  # the grid; `runs` has what is not in its pack
CLAIMS = [pytest.param(claim, id=claim.says) for claim in study.PRIMARY + study.EXPLORED]


def name_of(job):
    return f"{job.name}-{job.train.seed}"


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_about_runs_that_there_are_as_often_as_it_says(claim):
    jobs = JOBS[claim.experiment]
    if claim.trunk:
        trunks = [job for job in jobs if job.name == claim.trunk]
        assert {job.train.seed for job in trunks} == {*claim.planned}
        assert all({claim.better, claim.worse} <= {branch.name for branch in job.branches} for job in trunks)
    else:
        for side in (claim.better, claim.worse):
            assert {job.train.seed for job in jobs if job.name == side} == {*claim.planned}


def test_there_are_six_primary_claims_with_one_measure_each():
    assert [claim.about for claim in study.PRIMARY] == ["CCQ", "Q-Delta", "CARVE", "LUCID", "The composition", "Polar + memory"]
    margins = {claim.about: claim.margin for claim in study.PRIMARY}
    assert margins == {
        "CCQ": 0.03,
        "Q-Delta": 0.02,
        "CARVE": 0.02,
        "LUCID": 0.02,
        "The composition": 0.01,
        "Polar + memory": 0.1,
    }


def test_a_claim_has_the_ends_that_its_task_has():
    """A guess and the best there is: of recall both, of text the guess alone."""
    ends = {claim.about: (claim.measure.floor, claim.measure.ceiling) for claim in study.PRIMARY}
    guess, text = pytest.approx(math.log(10)), pytest.approx(math.log(mixers.VOCABULARY))
    assert ends["Q-Delta"] == ends["CARVE"] == (guess, 0.0) and ends["Polar + memory"] == (0.0, 1.0)
    assert ends["LUCID"] == (text, None) and ends["The composition"] == (0.0, None)
    claim = forks.CLAIMS[0]._replace(seeds=2)
    nats = lambda x: {"recall": {"2048": {"nll": x}}}
    runs = [
        {"name": "gated-deltanet", "seed": seed, "branches": {"qdelta": nats(2.30), "itself": nats(2.31)}}
        for seed in claim.planned
    ]
    assert answers((claim,), {"forks": runs})[0].word == "no range: at chance"


def test_every_run_has_a_name_of_its_own_and_what_is_chosen_has_seeds_of_its_own():
    for jobs in JOBS.values():
        assert len({name_of(job) for job in jobs}) == len(jobs)
    tests = {
        r.train.seed
        for name, jobs in JOBS.items()
        if name != "rates"
        for job in jobs
        for r in ([job] if isinstance(job, Capacity) else recipes_of([job]))
    }
    choosing = {job.train.seed for job in (*JOBS["rates"], *capacity.rates())} | {rates.EVALUATE.seed}
    assert not tests & choosing
    for name, jobs in JOBS.items():
        assert {r.evaluate.side for r in recipes_of(jobs)} <= {"development" if name == "rates" else "held_out"}


def test_no_run_reads_the_text_more_often_than_it_may_and_recall_is_asked_128_times_at_least():
    for name, jobs in JOBS.items():
        for recipe in recipes_of(jobs):
            if name != "reach":  # the first study's recipe, 157M tokens
                assert recipe.tokens() <= text.EPOCHS * text.TRAINING
            assert recipe.evaluate.rows >= 128 or not (recipe.evaluate.tasks or recipe.evaluate.recall)
            assert recipe.corpus == text.corpus()


def test_recall_is_trained_as_the_issue_asks():
    for name in ("pilot", "forks"):
        for recipe in recipes_of(JOBS[name]):
            if len(recipe.phases) > 1:
                warm, after = recipe.phases
                assert (warm.until.excess, after.task.sparse) == (0.1, 0.4) and isinstance(after.task, RecallMix)
                assert after.task.weight == (1.0 if recipe.name.endswith("once") else 8.0)
    assert base.BY / base.STEPS == 0.3 and 0.25 <= forks.MIX.overwritten <= 0.5


def test_the_minutes_are_those_that_there_are(monkeypatch):
    """By the pace that base.py assumes; capacity's runs took 29 minutes."""
    minutes = {
        "pilot": base.seconds(JOBS["pilot"]) / 60,
        "rates": 2 * base.seconds(JOBS["rates"]) / 60,  # the grid, and as many runs after it
        "forks": forks.seconds(JOBS["forks"]) / 60,
        "language": base.seconds(JOBS["language"]) / 60,
        "reach": reach.seconds(JOBS["reach"]) / 60,
    }
    assert all(minutes[name] <= study.EXPERIMENTS[name].MINUTES for name in minutes)
    assert sum(module.MINUTES for module in study.EXPERIMENTS.values()) <= 280
    monkeypatch.setattr(language, "STEPS", 100_000_000 // (base.ROWS * base.LENGTH))
    assert base.seconds(language.runs()) / 60 > language.MINUTES  # what language.py says of the tokens that were planned


def test_what_a_text_experiment_compares_is_a_pair_of_models():
    sides = {(pair.better, pair.worse) for pair in mixers.PAIRS}
    assert {(claim.better, claim.worse) for claim in language.CLAIMS + language.EXPLORED} <= sides
    assert set(language.MIXERS) == set(base.RATES) and set(base.FAMILY.values()) <= set(base.RATES)
    assert {*base.RATES, *base.FAMILY} == mixers.MIXERS.keys()


# E2


def found(**families):
    """Losses of the first seed on the grid."""
    return {
        name.replace("_", "-"): {lr: {rates.SEEDS[0]: loss} for lr, loss in zip(rates.GRID, of, strict=True)}
        for name, of in families.items()
    }


def test_rates_go_beyond_an_edge_and_then_the_two_best_have_two_more_seeds():
    grid = {(family, lr, 100) for family in rates.FAMILIES for lr in rates.GRID}
    more = lambda losses: set(rates.wanted(losses)) - grid
    assert set(rates.wanted({})) == grid
    inside = found(qdelta=(3.0, 2.0, 2.5, 2.9))
    assert more(inside) == {("qdelta", lr, seed) for lr in (1e-3, 2e-3) for seed in (101, 102)}
    edge = found(ccq=(3.0, 2.9, 2.5, 2.1))
    assert more(edge) == {("ccq", 8e-3, 100)}
    edge["ccq"][8e-3] = {100: 2.3}
    assert more(edge) == {("ccq", 8e-3, 100)} | {("ccq", lr, seed) for lr in (4e-3, 8e-3) for seed in (101, 102)}
    edge["ccq"][8e-3] = {100: 2.0}
    assert more(edge) == {("ccq", 8e-3, 100), ("ccq", 16e-3, 100)}
    edge["ccq"][8e-3] = {100: math.inf}  # aborted
    assert more(edge) == {("ccq", 8e-3, 100)} | {("ccq", lr, seed) for lr in (2e-3, 4e-3) for seed in (101, 102)}
    low = found(carve=(2.0, 2.1, 2.2, 2.3))
    assert more(low) == {("carve", 0.25e-3, 100)}


def test_the_rate_that_is_chosen_has_the_least_mean_over_three_seeds(tmp_path):
    runs = {
        ("softmax", 1e-3): (2.0, 2.4, 2.5),
        ("softmax", 2e-3): (2.1, 2.1, 2.2),
        ("softmax", 4e-3): (1.9,),
        ("lucid", 2e-3): (2.0, 2.0, 2.0),
    }
    entries = {}
    for (family, lr), of in runs.items():
        for seed, loss in zip(rates.SEEDS, of, strict=False):
            job = rates.run(family, lr, seed)
            entries[name_of(job)] = {"name": job.name, "seed": seed, "loss": {"2048": loss}}
    ended = rates.run("softmax", 8e-3, 100)
    entries[name_of(ended)] = {"name": ended.name, "seed": 100, "ended": {"step": 7, "steps": 500, "why": "the norm"}}
    write_pack(tmp_path / "rates.jsonl.xz", entries)
    losses = rates.losses(read_pack(tmp_path / "rates.jsonl.xz"))
    assert losses["softmax"][1e-3] == {100: 2.0, 101: 2.4, 102: 2.5} and losses["softmax"][8e-3] == {100: math.inf}
    assert rates.chosen(losses) == {"softmax": 2e-3}


def test_what_is_in_the_pack_is_not_run_again(tmp_path, monkeypatch):
    first = JOBS["rates"][0]
    write_pack(
        tmp_path / "rates.jsonl.xz",
        {name_of(first): {"name": first.name, "seed": first.train.seed, "loss": {"2048": 4.0}, "train": {"loss": []}}},
    )
    monkeypatch.setattr(rates, "PACK", tmp_path / "rates.jsonl.xz")
    assert rates.runs() == JOBS["rates"][1:]


def test_the_rates_of_the_recipes_are_those_that_were_chosen():
    assert rates.chosen(rates.losses(read_pack(rates.PACK))).items() <= base.RATES.items()


# end to end, in small


def numbers(entry, places):
    for place in places:
        value = entry
        for name in place.split("/"):
            value = value[name]
        assert isinstance(value, int | float), place


def packed(tmp_path, name, entry):
    """The entry after it went through a pack."""
    write_pack(tmp_path / "pack.jsonl.xz", {name: entry})
    (again,) = read_pack(tmp_path / "pack.jsonl.xz").values()
    assert again == json.loads(json.dumps(slim(entry)))
    return again


def test_a_pilot_run_passes_its_gate_and_recalls(small, tmp_path):
    entry = packed(tmp_path, "pilot", run_job(small(pilot.runs()[0]), tmp_path / "runs" / "pilot" / "gated-deltanet-0"))
    assert entry["gate"]["step"] is not None and entry["gate"]["most"] == 2
    numbers(
        entry, ["recall/96/nll", "recall/192/accuracy", "needle/96/nll", "needles/192/accuracy", "loss/96", "train/seconds"]
    )


def test_a_run_of_the_rates_has_its_development_loss(small, tmp_path):
    entry = packed(tmp_path, "rates", run_job(small(JOBS["rates"][0]), tmp_path / "runs" / "rates" / "a"))
    numbers(entry, ["loss/96"])
    assert entry["config"]["evaluate"]["side"] == "development"


CAPACITY = {
    job.name: job for job in JOBS["capacity"] if job.train.seed == 0 and "-16" not in job.name and "-64" not in job.name
}


@pytest.mark.parametrize("name", [n if n in ("ccq", "released") else pytest.param(n, marks=pytest.mark.slow) for n in CAPACITY])
def test_a_capacity_run_is_asked_at_every_load_and_a_stopped_one_goes_on(small, tmp_path, name):
    job, steps = small(CAPACITY[name], 6), []
    entry = run_job(job, tmp_path / "whole")
    numbers(
        packed(tmp_path, name, entry),
        ["capacity/accuracy", "capacity/loads/2/nll", "capacity/loads/4/accuracy", "loss/32", "state_bytes/32"],
    )
    assert entry["config"]["impl"] == ("torch" if name in capacity.PLAIN else "auto") and len(entry["train"]["loss"]) == 6
    assert run_job(job, tmp_path / "cut", steps.append, lambda: len(steps) == 3) is None
    again = run_job(job, tmp_path / "cut")
    assert again["capacity"] == entry["capacity"] and again["train"]["loss"] == entry["train"]["loss"]


def test_a_capacity_run_begins_with_few_pairs_in_short_rows_of_as_many_tokens(small):
    job, cpu = small(CAPACITY["ccq"], 6), torch.device("cpu")
    shapes = {(tuple(x.input_ids.shape), int((x.labels >= 0).sum())) for x in (job.batch_of(step, cpu) for step in (0, 1))}
    assert shapes == {((8, 16), 8 * 1), ((8, 16), 8 * 2)}
    shapes = {(tuple(x.input_ids.shape), int((x.labels >= 0).sum())) for x in (job.batch_of(step, cpu) for step in (2, 3))}
    assert shapes == {((4, 32), 4 * 2), ((4, 32), 4 * 4)}


@pytest.mark.parametrize(
    "field, said",
    [({"steps": 6}, "warm_up.steps is 6, expected fewer than train.steps, 6"), ({"length": 24}, "warm_up.length is 24, expected a divisor of 4 x 32"), ({"pairs": (8,)}, "8 pairs")],
)  # fmt: skip
def test_a_warm_up_that_does_not_fit_is_refused(small, field, said):
    job = small(CAPACITY["ccq"], 6)
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(job, warm_up=dataclasses.replace(job.warm_up, **field))


def test_the_rule_and_what_was_released_are_one_function_at_lambda_zero(small, tmp_path):
    entries = [run_job(small(CAPACITY[name]), tmp_path / name) for name in ("rule-0", "released-0")]
    assert entries[0]["train"]["loss"] == pytest.approx(entries[1]["train"]["loss"], rel=1e-5)


def test_branches_start_as_their_trunk_bit_by_bit_and_are_measured(small, tmp_path):
    """Of a toy of the study's own fork: Gated DeltaNet, Q-Delta and CCQ."""
    job = small(JOBS["forks"][0])
    directory = tmp_path / "runs" / "forks" / "gated-deltanet-0"
    entry = run_job(job, directory)
    packed(tmp_path, "forks", entry)
    assert list(entry["branches"]) == ["itself", "qdelta", "ccq"] and entry["gate"]["step"] is not None
    for branch in entry["branches"].values():
        assert branch["apart"] == 0.0
        numbers(branch, ["recall/96/nll", "recall/96/kept/nll", "loss/96"])
        assert branch["train"]["loss"][0] == entry["branches"]["itself"]["train"]["loss"][0]  # the same rows, the same function
    assert entry["branches"]["ccq"]["train"]["loss"] != entry["branches"]["itself"]["train"]["loss"]  # it leaves its start


@pytest.mark.slow
def test_carves_branches_start_as_blind_and_a_stopped_fork_goes_on(small, tmp_path):
    job, steps = small(JOBS["forks"][1]), []
    whole = run_job(job, tmp_path / "runs" / "forks" / "a")
    assert [branch["apart"] for branch in whole["branches"].values()] == [0.0, 0.0]
    assert run_job(job, tmp_path / "runs" / "forks" / "b", steps.append, lambda: len(steps) == 8) is None
    assert steps[-1].step == 8 and steps[-1].steps == 12  # in the first branch
    again = run_job(job, tmp_path / "runs" / "forks" / "b")
    for name, branch in whole["branches"].items():
        assert (
            again["branches"][name]["recall"] == branch["recall"]
            and again["branches"][name]["train"]["loss"] == branch["train"]["loss"]
        )


def test_a_trunk_that_passes_its_gate_after_its_warm_up_has_no_branches(tmp_path):
    job = JOBS["forks"][0]
    assert job.trunk.phases[0].steps == forks.BY < forks.TRUNK
    late = {"name": job.name, "seed": 0, "gate": {"step": forks.BY + 1, "most": forks.BY}}
    write_json(tmp_path / "trunk" / "result.json", late)
    assert run_job(job, tmp_path)["branches"] == {}


@pytest.mark.slow
def test_a_trunk_that_does_not_pass_its_gate_has_no_branches(small, tmp_path):
    job = small(JOBS["forks"][0])
    first = dataclasses.replace(job.trunk.phases[0], until=dataclasses.replace(job.trunk.phases[0].until, excess=1e-3))
    job = dataclasses.replace(job, trunk=dataclasses.replace(job.trunk, phases=(first, job.trunk.phases[1])))
    entry = run_job(job, tmp_path / "runs" / "forks" / "a")
    assert entry["branches"] == {} and entry["gate"]["step"] is None
    assert answers(forks.CLAIMS, {"forks": [entry]})[0].passed == (0, 1)


def test_a_sweep_that_goes_on_knows_the_result_of_a_fork(tmp_path):
    """Fields that a resumed run may change, as compile, stand in the config of each part and in no fingerprint."""
    job, result = JOBS["forks"][0], tmp_path / "a.json"
    write_json(result, {"config": job.to_dict()})
    assert finished(result, job, tmp_path / "a")
    branches = tuple(dataclasses.replace(one, train=dataclasses.replace(one.train, seed=9)) for one in job.branches)
    with pytest.raises(RunError, match=r"ccq\.train\.seed, itself\.train\.seed, qdelta\.train\.seed"):
        finished(result, dataclasses.replace(job, branches=branches), tmp_path / "a")


def test_a_text_run_tells_what_its_context_gives(small, tmp_path):
    job = next(job for job in JOBS["language"] if job.name == "composition")
    entry = packed(tmp_path, "language", run_job(small(job), tmp_path / "runs" / "language" / "a"))
    numbers(entry, ["context/loss", "context/gain", "context/tokens", "loss/96"])


@pytest.mark.slow
def test_a_run_of_reach_finds_or_not_at_both_lengths(small, tmp_path):
    entry = packed(tmp_path, "reach", run_job(small(JOBS["reach"][1]), tmp_path / "runs" / "reach" / "a"))
    numbers(entry, ["needle/96/accuracy", "induction/192/accuracy", "needle/192/nll"])


def test_a_fork_refuses_branches_that_are_no_pairs():
    job = JOBS["forks"][0]
    one, two, three = job.branches
    other = dataclasses.replace(two, train=dataclasses.replace(two.train, seed=9))
    for branches, said in (
        ((one, other), "differ in their corpus, their phases or their training"),
        ((one, dataclasses.replace(three, name="trunk")), "names of their own"),
    ):
        with pytest.raises(ValueError, match=said):
            Fork(trunk=job.trunk, branches=branches)
    with pytest.raises(ValueError, match="the trunk has no gate"):
        Fork(
            trunk=dataclasses.replace(
                job.trunk, phases=(dataclasses.replace(job.trunk.phases[0], until=None), job.trunk.phases[1])
            ),
            branches=job.branches,
        )
