"""--set and --steps: what is changed, what follows, what is refused."""

import dataclasses
import math

import pytest

from needlework.cli.overrides import changed, of_steps
from needlework.cli.recipes import load_recipe
from needlework.recipes import atma, comparison

DEMO = load_recipe("demo:qdelta")
RECIPES = [DEMO, atma.polar_memory_distractor(), *(comparison.recipe(name) for name in ("window", "ccq-qdelta", "kda-polar"))]


def at(config, path):
    for name in path.split("."):
        config = (
            config[int(name)]
            if isinstance(config, tuple)
            else config[name]
            if isinstance(config, dict)
            else getattr(config, name)
        )
    return config


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("phases.0.batch=32", 32),
        ("phases.1.length=512", 512),
        ("phases.0.task.dense_pairs.1=2", 2),
        ("phases.0.task.dense_pairs=[2, 4]", (2, 4)),
        ("evaluate.tasks=('passkey',)", ("passkey",)),
        ("evaluate.tasks=['passkey', 'uuid']", ("passkey", "uuid")),
        ("evaluate.tasks.1=passkey", "passkey"),
        ("evaluate.lengths.0=128", 128),
        ("evaluate.positions=512", 512),
        ("train.optim.betas.0=0.5", 0.5),
        ("train.optim.rates=(('*embed*', 1),)", (("*embed*", 1.0),)),
        ("train.optim.lr=1", 1.0),
        ("train.clip=inf", math.inf),
        ("train.autocast=bf16", "bf16"),
        ("start=7", "7"),
        ("model.softcap=15", 15.0),
        ("model.layout=MMM", "MMM"),
        ("model.mixers.M.conv=None", None),
        ("model.mixers.M.read.kind=ccq", "ccq"),
        ("model.mixers.M.write.gate.half_life=64", 64.0),
        ("model.mlp=None", None),
        (
            f"model.mixers={DEMO.model.mixers | {'N': DEMO.model.mixers['M']}!r}",
            {letter: DEMO.model.mixers["M"] for letter in "MN"},
        ),
    ],
)
def test_set_reaches(setting, value):
    assert at(changed(DEMO, [setting]), setting.partition("=")[0]) == value


def test_nothing_but_the_field_changes():
    new = changed(DEMO, ["phases.0.batch=32"])
    assert dataclasses.replace(new, phases=DEMO.phases) == DEMO
    assert dataclasses.replace(new.phases[0], batch=16) == DEMO.phases[0] and new.phases[1] == DEMO.phases[1]


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_every_field_takes_its_own_value(recipe):
    """So what a field is declared as, and what recipes put there, agree."""
    settings = [f"{path}={value!r}" for path, value in leaves(recipe)]
    assert len(settings) > 40 and changed(recipe, settings).to_dict() == recipe.to_dict()


def leaves(config, path=""):
    if dataclasses.is_dataclass(config) and not hasattr(config, "to_diff_dict"):
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    elif hasattr(config, "to_diff_dict"):
        fields = {name: getattr(config, name) for name in type(config).__annotations__}
    elif isinstance(config, dict):
        fields = config
    elif isinstance(config, tuple) and config and dataclasses.is_dataclass(config[0]):
        fields = dict(enumerate(config))
    else:
        yield path, config
        return
    for name, value in fields.items():
        yield from leaves(value, f"{path}.{name}" if path else str(name))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.steps"], "expected FIELD=VALUE"),
        (["train.stesp=3"], "--set train.stesp: no field 'stesp' (did you mean 'steps'?)"),
        (["phases.7.steps=1"], "--set phases.7: no field '7'; known: 0, 1"),
        (["phases.-1.steps=1"], "no field '-1'"),
        (["phases.0.steps=1.5"], "expected a whole number >= 1 such as 500"),
        (["phases.0.task=5"], "expected a NeedleMix or a Text"),
        (["phases.0.task.dense_pairs=(1, 2, 3)"], "expected (a whole number, a whole number) such as (1, 3)"),
        (["evaluate.tasks=passkey"], "expected a tuple of (a string) such as ('needle', 'needles')"),
        (["evaluate.tasks=(1,)"], "expected a tuple of (a string)"),
        (["evaluate.lengths=(96, 'a')"], "expected a tuple of (a whole number >= 1)"),
        (["evaluate.lengths=(96, True)"], "expected a tuple of (a whole number >= 1)"),
        (["evaluate.positions=abc"], "got 'abc', expected a whole number >= 1 or None"),
        (["evaluate.positions=(512,)"], "expected a whole number >= 1 or None"),
        (["model.softcap=x"], "expected a number > 0 or None"),
        (["objective=5"], "expected a Objective or None"),
        (["objective.weight=1"], "objective is None, which has no fields"),
        (["train.optim.lr.x=1"], "train.optim.lr is 0.004, which has no fields"),
        (["train.optim={'kind': 'muon'}"], "expected a AdamW or a Muon"),
        (["train.optim.kind=muon"], "expected 'adamw'"),
        (["train.optim.betas=(0.9,)"], "expected (a number in [0, 1), a number in [0, 1)) such as (0.9, 0.98)"),
        (["train.optim.lr=nan"], "got 'nan', expected a number >= 0 such as 0.004"),
        (["train.optim.lr=1e"], "expected a number >= 0 such as 0.004"),
        (["train.optim.lr=" + "9" * 400], "expected a number >= 0 such as 0.004"),
        (["train.optim.lr=" + "-" * 5000 + "1"], "expected a number >= 0 such as 0.004"),
        (["train.autocast=fp8"], "expected 'bf16' or None"),
        (["train.compile=1"], "expected True or False such as False"),
        (["train.seed=True"], "expected a whole number >= 0, of 64 bits such as 0"),
        (["train.schedule.warmup=-5"], "got '-5', expected a whole number >= 0 such as 40"),
        (["model.mixers.M.heads=2.5"], "expected a whole number >= 1 such as 1"),
        (["model.mixers.M.read={'kind': 'nope'}"], "unknown kind 'nope'"),
        (["train.optim.lr=1", "train.optim=1"], "one of them is meant"),
        (["train.optim=1", "train.optim.lr=1"], "one of them is meant"),
        (["train.steps=50"], "the recipe's phases have 900 steps; set phases.0.steps and so on, or shorten them all"),
        (["train.steps=50", "phases.0.steps=50"], "the phases have 450 steps, train.steps is 50"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(settings, says):
    with pytest.raises(ValueError) as refused:
        changed(DEMO, settings)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_the_steps_follow_the_phases():
    new = changed(DEMO, ["phases.0.steps=50"])
    assert [phase.steps for phase in new.phases] == [50, 400] and new.train.steps == 450
    both = changed(DEMO, ["train.steps=450", "train.seed=3", "phases.0.steps=50"])
    assert both.train == dataclasses.replace(DEMO.train, steps=450, seed=3)


def test_settings_that_belong_together_are_made_together():
    """Neither order of two would be a recipe in between."""
    batches = ["phases.0.batch=6", "phases.1.batch=9"]
    for settings in (["train.accumulate=3", *batches], [*batches, "train.accumulate=3"]):
        new = changed(DEMO, settings)
        assert new.train.accumulate == 3 and [phase.batch for phase in new.phases] == [6, 9]
    files = changed(DEMO, ["corpus.paths=('a',)", "corpus.kind=files"])
    assert files.corpus.paths == ("a",)


def test_of_one_fields_settings_the_last_counts():
    assert changed(DEMO, ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("steps", "phases", "warmup"),
    [(50, [28, 22], 3), (2, [1, 1], 1), (3, [2, 1], 1), (900, [500, 400], 40), (9000, [5000, 4000], 40)],
)
def test_a_run_of_so_many_steps_keeps_its_phases_shares(steps, phases, warmup):
    new, told = of_steps(DEMO, steps)
    assert [phase.steps for phase in new.phases] == phases and new.train.steps == steps == sum(phases)
    assert new.train.schedule == dataclasses.replace(DEMO.train.schedule, warmup=warmup) and warmup <= steps
    assert told == f"qdelta: {steps} steps instead of 900: phases {phases[0]} + {phases[1]}, warm-up {warmup}"


def test_every_phase_has_a_step_however_small_its_share():
    long = changed(DEMO, ["phases.0.steps=1", "phases.1.steps=100000"])
    assert [phase.steps for phase in of_steps(long, 7)[0].phases] == [1, 6]
    assert [phase.steps for phase in of_steps(changed(DEMO, ["phases.0.steps=100000"]), 7)[0].phases] == [6, 1]
    with pytest.raises(ValueError, match="--steps 1: recipe qdelta has 2 phases"):
        of_steps(DEMO, 1)
