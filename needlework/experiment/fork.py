"""A fork: a trunk is trained past its gate, then branches are trained from it, each from the same weights, on the same data.

A branch's model is the trunk's, or has more weights that change nothing at first (a factor of 0, W₂ = 0); so branches are paired by
construction, and what they differ in is what the additions learn. Each starts with a fresh optimiser, the trunk's own model too.

    <run>/trunk/, <run>/<branch>/     runs (runner.py)
          result.json                 the trunk's entry, and under "branches" each branch's, with "apart": the largest difference of its
                                      logits at its start from the trunk's, on the first row that it trains on

A trunk that has not passed its gate when its warm-up's steps are over has no branches, though it may pass later: one rule for all trunks.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from needlework.data import Corpus
from needlework.experiment.claim import write_json
from needlework.experiment.pretrained import load_model
from needlework.experiment.reader import reader
from needlework.experiment.recipe import Recipe, build, text
from needlework.experiment.runner import ended_entry, run
from needlework.json_file import read_json
from needlework.report.asked import passes
from needlework.train import BadStep, Progress, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A trunk and its branches, whose `start` is the trunk. ValueError for a trunk without a gate, branches of one name or of other
    data."""

    trunk: Recipe
    branches: tuple[Recipe, ...]

    def __post_init__(self):
        names = [branch.name for branch in self.branches]
        if len({*names, "trunk", self.name}) < len(names) + 2:
            raise ValueError(
                f"fork {self.name}: its branches are {', '.join(names)}, expected names of their own, and not trunk"
            )
        if self.trunk.gate is None:
            raise ValueError(f"fork {self.name}: the trunk has no gate")
        data = [(branch.corpus, branch.phases, _alike(branch.train)) for branch in self.branches]
        if any(of != data[0] for of in data):
            raise ValueError(f"fork {self.name}: its branches differ in their corpus, their phases or their training")

    @property
    def name(self) -> str:
        return self.trunk.name

    @property
    def title(self) -> str:
        return self.trunk.title

    @property
    def train(self) -> TrainConfig:
        return self.trunk.train

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return self.trunk, *self.branches

    def tokens(self) -> int:
        return sum(recipe.tokens() for recipe in self.recipes)

    def to_dict(self) -> dict[str, Any]:
        return (
            {"train": self.trunk.to_dict()["train"]}
            | {part.name: part.to_dict() for part in self.branches}
            | {"trunk": self.trunk.to_dict()}
        )

    def resume_fingerprint(self) -> dict[str, Any]:
        parts = {branch.name: branch.resume_fingerprint() for branch in self.branches}
        return parts | {"trunk": self.trunk.resume_fingerprint(), "train": self.train.resume_fingerprint()}


def run_fork(
    fork: Fork,
    directory: Path,
    corpora: Path,
    on_step: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Trains and measures the trunk, then each branch, in `directory`, from where an earlier call stopped; None if it was stopped.

    An aborted branch has "ended" in its entry; of a trunk the guard's error is raised.
    """
    done = directory / "result.json"
    if done.exists():
        return read_json(done)
    go = lambda recipe, part: run(recipe, directory / part, on_step=_of_all(fork, recipe, on_step), stop=stop, corpora=corpora)
    entry = go(fork.trunk, "trunk")
    if entry is None:
        return None
    branches = {}
    for branch in fork.branches if passes(entry) else ():
        recipe = replace(branch, start=str(directory / "trunk" / "checkpoint"), grows=True)
        try:
            found = go(recipe, branch.name)
        except BadStep as error:
            branches[branch.name] = ended_entry(recipe, directory / branch.name, error)
            continue
        if found is None:
            return None
        branches[branch.name] = found | {"apart": apart(recipe, text(recipe, corpora))}
    entry = entry | {"branches": branches, "config": fork.to_dict()}
    write_json(done, entry)
    return entry


def _of_all(fork: Fork, recipe: Recipe, on_step: Callable[[Progress], None] | None) -> Callable[[Progress], None] | None:
    """on_step, with a part's steps counted among those of the whole fork."""
    if on_step is None:
        return None
    names = [part.name for part in fork.recipes]
    before = sum(part.train.steps for part in fork.recipes[: names.index(recipe.name)])
    steps = sum(part.train.steps for part in fork.recipes)
    return lambda progress: on_step(replace(progress, step=before + progress.step, steps=steps))


def _alike(train: TrainConfig) -> dict[str, Any]:
    """What branches have in common: all but the rates of what a branch adds."""
    described = asdict(train)
    return described | {"optim": {name: value for name, value in described["optim"].items() if name != "rates"}}


@torch.no_grad()
def apart(branch: Recipe, corpus: Corpus) -> float:
    """max |Δ logits| between a branch at its start and its trunk, on the first row that the branch trains on; 0 where they are
    bit-equal."""
    assert branch.start is not None
    ids = branch.batch(corpus, 0).input_ids[:1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    read = lambda model: reader(model.to(device).eval())(ids)
    return (read(build(branch)).float() - read(load_model(Path(branch.start))).float()).abs().max().item()
