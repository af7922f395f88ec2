"""The second study's models: what is compared differs in what its claim is about, and in nothing else."""

from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch

from needlework.experiment.runner import state_bytes
from needlework.models import NeedleworkForCausalLM
from needlework.models.presets import count_parameters
from needlework.recipes import comparison
from needlework.recipes.study import capacity, forks, mixers, pilot, reach

model = mixers.model


def flat(value, at=""):
    """{"attend.kind": "softmax", …} of the mixers of a model's config, without the letter that a mixer has in the layout."""
    if not isinstance(value, dict):
        return {at: value}
    return {name: x for key, inner in value.items() for name, x in flat(inner, f"{at}.{key}" if at else key).items()}


def differing(better, worse):
    """The names of the fields in which two models' configs differ: of a mixer by its own name, of the rest of the model by theirs."""
    sides, found = [config.to_diff_dict() for config in (better, worse)], set()
    assert sides[0]["mixers"].keys() == sides[1]["mixers"].keys()
    for letter in sides[0]["mixers"]:
        a, b = (flat(side["mixers"][letter]) for side in sides)
        found |= {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    a, b = (flat({key: value for key, value in side.items() if key != "mixers"}) for side in sides)
    return found, {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


PAIRS = [pytest.param(pair, id=f"{pair.better} against {pair.worse}") for pair in mixers.PAIRS]


def check(better, worse, differ, more):
    """The two configs differ in the fields `differ` of their mixers, all of them, and outside of these in `more` at most."""
    found, outside = differing(better, worse)
    assert outside <= more
    assert not [name for name in found if not any(fnmatchcase(name, pattern) for pattern in differ)]
    assert not [pattern for pattern in differ if not any(fnmatchcase(name, pattern) for name in found)]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_differs_in_the_fields_that_it_names_and_in_no_other(pair):
    check(model(pair.better), model(pair.worse), pair.differ, {"mlp.hidden"})


SMALL_PAIRS = [pytest.param(pair, id=f"{pair.better} against {pair.worse}") for pair in capacity.PAIRS]


@pytest.mark.parametrize("pair", SMALL_PAIRS)
def test_a_pair_of_capacity_runs_differs_in_the_fields_that_it_names_and_holds_as_many_bytes(pair):
    better, worse = (capacity.run(name, 0) for name in (pair.better, pair.worse))
    check(better.model, worse.model, pair.differ, set())
    of = lambda job: {name: value for name, value in job.to_dict().items() if name not in ("name", "title", "model")}
    assert of(better) == of(worse)
    with torch.device("meta"):
        bytes_ = [state_bytes(NeedleworkForCausalLM(job.model), capacity.LENGTH, torch.bfloat16) for job in (better, worse)]
    assert bytes_[0] == pytest.approx(bytes_[1], rel=0.02)
    assert pair.better in capacity.PLAIN or "rule" not in pair.better  # the couplings are compared in plain PyTorch, both


def test_what_reach_compares_differs_in_how_it_attends():
    check(*(comparison.model(name) for name in ("polar-memory", "nope-memory")), ("attend.kind",), {"mlp.hidden"})
    assert {claim.better: claim.worse for claim in reach.CLAIMS} == {"polar-memory": "nope-memory"}


def test_a_branch_has_what_its_trunk_has_and_what_it_is_about():
    for trunk, branches in forks.BRANCHES.items():
        job = forks.fork(trunk, 0)
        itself, *others = job.branches
        check(itself.model, job.trunk.model, (), set())
        added = {
            "qdelta": ("write.kind", "write.coupling", "write.factor"),
            "ccq": ("read.*",),
            "carve": ("write.rank",),
        }
        for branch in others:
            check(branch.model, itself.model, added[branch.name], set())
        assert [branch.name for branch in job.branches] == list(branches)


@cache
def built(name):
    with torch.device("meta"):
        return NeedleworkForCausalLM(model(name))


def held(name, T):
    return state_bytes(built(name), T, torch.bfloat16)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_holds_as_many_bytes_a_sequence(pair):
    """Within 2 %: CARVE's chunk statistics are 2 V of K V numbers a head, 1.6 %."""
    for T in (2048, 65_536):
        assert held(pair.better, T) == pytest.approx(held(pair.worse, T), rel=0.02)


@pytest.mark.parametrize("mixer", mixers.MIXERS)
def test_a_model_has_its_size(mixer):
    assert count_parameters(model(mixer)) == pytest.approx(mixers.SMALL.parameters, rel=0.01)


@torch.no_grad()
def starts(name):
    """The half-lives at which the gates of a model's first layer start, in tokens, sorted."""
    torch.manual_seed(0)
    config = model(name)
    mixer = config.mixer(config.layout[0]).build(config.hidden_size)
    write = mixer.memory.write if getattr(mixer, "memory", None) is not None else mixer.write
    if write.config.kind == "carve":
        h = torch.log(torch.tensor(2.0)) / torch.nn.functional.softplus(write.dt_bias)
        return (h / 2).flatten()  # its erase starts at h too, and each token decays by both
    for p in write.gate.project.parameters():
        p.zero_()  # a model starts its biases at zero
    return (-torch.log(torch.tensor(2.0)) / write.gate(torch.zeros(1, 1, config.hidden_size))).flatten()


GATED = [name for name in mixers.MIXERS if not name.endswith("published") and name.split("-")[0] not in ("softmax", "lucid")]


@pytest.mark.parametrize("name", [*GATED, "softmax-memory"])
def test_every_gate_starts_at_half_lives_of_one_spread(name):
    """Evenly in log: their mean in log is that of the spread's ends, and none lies outside."""
    low, high = mixers.SPREAD
    h = starts(name)
    assert h.min() >= low and h.max() <= high and h.max() / h.min() > (high / low) ** (1 / 2)
    assert h.log().mean().exp() == pytest.approx((low * high) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in mixers.MIXERS if name.endswith("-published")])
def test_a_published_start_is_a_row_of_its_own_and_is_run(name):
    assert name in pilot.MIXERS
    assert starts(name).log().mean() != pytest.approx(starts(name.removesuffix("-published")).log().mean().item(), abs=0.1)


def test_every_pair_is_of_models_of_the_study_and_every_hybrid_has_a_control_of_its_layout():
    sides = {(pair.better, pair.worse) for pair in mixers.PAIRS}
    assert {name for pair in sides for name in pair} == mixers.MIXERS.keys()
    for name, entry in mixers.MIXERS.items():
        if len(entry.layout) > 1:
            (other,) = {b if a == name else a for a, b in sides if name in (a, b)}
            assert mixers.MIXERS[other].layout == entry.layout
