"""Two ranks train as one does: the same losses and weights, however rows, tokens and weights are divided; and go on as one does."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from needlework.layers import SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.testing.ranks import ranks
from needlework.testing.rows import chosen
from needlework.train import AdamW, Guard, NonFiniteLoss, Parallel, World, full_state, latest, load, train, world

from .tiny import CONFIG, OPTIMISERS, VOCABULARY, Tiny, batch, lines, stop_at

SIZES = Sizes(heads=2, key_dim=4, value_dim=6, attention_heads=2, kv_heads=2, head_dim=4, content_chunk=5)


def tiny():
    return Tiny(dropout=0.0)


def needle():
    torch.manual_seed(0)
    mixers = {letter: CATALOG[name].make(SIZES) for letter, name in (("Q", "qdelta"), ("S", "softmax"))}
    return NeedleworkForCausalLM(
        NeedleworkConfig(
            vocab_size=VOCABULARY, hidden_size=8, layout="QS", mixers=mixers, mlp=SwiGLU(hidden=8), initializer_range=0.3
        )
    )


def wide():
    return needle().double()


def ragged(index):
    """Ranks count different numbers of labels."""
    b = batch(index)
    b.labels[: 1 + index % 2, index % 5 :] = -100
    return b


class Added(NamedTuple):
    cross_entropy: Tensor
    auxiliary: Tensor
    share: float
    parts: dict[str, Tensor]


def with_auxiliary(model, piece):
    logits = model(piece.input_ids).double()
    entropy = nn.functional.cross_entropy(logits.flatten(0, 1), piece.labels.flatten(), ignore_index=-100, reduction="sum")
    size = logits.square().mean()
    return Added(entropy, 0.1 * size, 0.9, {"size": size.detach()})


def of_targets(model, piece):
    return model(piece.input_ids, targets=piece.labels, state_passing=piece.state_passing)


MUON = replace(CONFIG, optim=replace(OPTIMISERS["muon"], rest=AdamW(lr=1e-2, rates=(("*embed*", 0.1),))))
FEW = replace(CONFIG, steps=6, checkpoint_every=6)
JOBS = {  # what two ranks train, and how
    "adamw": (tiny, CONFIG, {}),
    "muon": (tiny, MUON, {}),
    "auxiliary": (tiny, FEW, {"losses": with_auxiliary}),
    "recomputed": (wide, replace(CONFIG, recompute=True), {"losses": of_targets}),
    "compiled": (wide, replace(CONFIG, compile=True), {"losses": of_targets}),
    "sequence": (wide, replace(FEW, parallel=Parallel(sequence=2)), {"losses": of_targets}),
    "tensor": (wide, replace(FEW, parallel=Parallel(tensor=2)), {"losses": of_targets}),
    "tensor, muon": (wide, replace(MUON, parallel=Parallel(tensor=2)), {"losses": of_targets}),
    "half": (needle, replace(FEW, autocast="bf16"), {"losses": of_targets}),
    "single": (needle, FEW, {"losses": of_targets}),
}


LONG = ("recomputed", "compiled", "tensor, muon")


def one(name, directory, **more):
    make, config, losses = JOBS[name]
    model = make()
    result = train(model, ragged, replace(config, parallel=Parallel(), compile=False), directory, **losses, **more)
    return result, full_state(model)


def bad_rows(index):
    """Of batch 9, which is in step 5, the last row, which the last rank holds, holds the token that Poisoned chokes on."""
    b = ragged(index)
    b.input_ids.clamp_(max=VOCABULARY - 2)
    if index == 9:
        b.input_ids[-1] = VOCABULARY - 1
    return b


def odd(index):
    b = batch(index)
    b.input_ids, b.labels = b.input_ids[:3], b.labels[:3]
    return b


class Poisoned(Tiny):
    def __init__(self):
        super().__init__(dropout=0.0)
        with torch.no_grad():
            self.embed.weight[-1] = torch.inf


def main(directory, what):
    directory = Path(directory)

    def do(job, directory, **more):
        make, config, losses = JOBS[job]
        model = make()
        result = train(model, ragged, config, directory, **losses, **more)
        return result, {name: x.clone() for name, x in full_state(model).items()}

    if what == "killed":

        def die(progress):
            if progress.step == 8 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        return do("adamw", directory / "killed", on_step=die)
    compile = nn.Module.compile  # the compiled blocks' graphs are made, without C++
    nn.Module.compile = lambda block, **settings: compile(block, backend="aot_eager", **settings)
    if what == "long":
        return {name: do(name, directory / name) for name in LONG} | {"killed": do("adamw", directory / "killed")}
    found = {name: do(name, directory / name) for name in JOBS if name not in LONG}
    found["to one"] = do("muon", directory / "to one", stop=stop_at(5))
    found["from one"] = do("muon", directory / "from one")
    with pytest.raises(NonFiniteLoss) as caught:
        train(Poisoned(), bad_rows, CONFIG, directory / "bad")
    found["bad"] = str(caught.value)
    skip = replace(CONFIG, guard=Guard(skip=1))
    found["skipped"] = train(Poisoned(), bad_rows, skip, directory / "skipped"), None
    with pytest.raises(ValueError) as caught:
        train(tiny(), odd, CONFIG, directory / "odd")
    found["odd"] = str(caught.value)
    with pytest.raises(ValueError) as caught:
        World.open(Parallel(shard=3))
    found["sizes"] = str(caught.value)
    found["share"] = apart(directory / f"host {dist.get_rank()}")
    return found


def apart(own):
    """What a run says whose ranks have each a disk of their own."""
    own.mkdir()
    os.chdir(own)
    world.LATE = 0
    with pytest.raises(ValueError) as caught:
        train(tiny(), ragged, CONFIG, "run")
    return str(caught.value), sorted(path.name for path in own.rglob("*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    one("muon", place / "from one", stop=stop_at(5))
    return place


@pytest.fixture(scope="module")
def found(place):
    return ranks(2, main, str(place), "short")[0]


@pytest.fixture(scope="module")
def long(place):
    with pytest.raises(RuntimeError, match="2 ranks of"):
        ranks(2, main, str(place), "killed")
    assert lines(place / "killed")[-1]["step"] >= 7  # one rank was in the next step, or had written this one's line, or not yet
    return ranks(2, main, str(place), "long")[0]


def same(found, expected, rel):
    assert found[0].losses == pytest.approx(expected[0].losses, rel=rel) and found[0].tokens == expected[0].tokens
    assert found[1].keys() == expected[1].keys()
    for name, x in expected[1].items():
        torch.testing.assert_close(
            found[1][name], x, rtol=0, atol=10 * rel * max(1, x.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


WEIGHED = [name for name in JOBS if JOBS[name][0] is not needle]


@pytest.mark.parametrize("job", chosen(WEIGHED, [name for name in WEIGHED if name not in LONG]))
def test_two_ranks_lose_what_one_does_and_end_with_its_weights(request, place, tmp_path, job):
    found = request.getfixturevalue("long" if job in LONG else "found")
    rel = 5e-5 if "muon" in job else 1e-6 if JOBS[job][0] is tiny else 1e-10
    same(found[job], one(job, tmp_path), rel)
    keys = ("step", "lr", "tokens")
    assert [[r[k] for k in keys] for r in lines(place / job)] == [[r[k] for k in keys] for r in lines(tmp_path)]
    more = ("size", "auxiliary") if job == "auxiliary" else ()
    for key in ("loss", "grad_norm", *more):
        assert [r[key] for r in lines(place / job)] == pytest.approx([r[key] for r in lines(tmp_path)], rel=10 * rel)


def test_in_half_precision_ranks_round_what_one_rounds(found, place, tmp_path):
    """The first step, before differences feed on themselves: much nearer than half precision is to single."""
    one("half", tmp_path / "half")
    one("single", tmp_path / "single")
    two, half, single = (lines(path)[0] for path in (place / "half", tmp_path / "half", tmp_path / "single"))
    for key in ("loss", "grad_norm"):
        assert abs(two[key] - half[key]) < abs(half[key] - single[key]) / 20


def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_the_reverse(found, place, tmp_path):
    expected = one("muon", tmp_path)
    assert load(latest(place / "to one"))["run.step"] == 5
    same(one("muon", place / "to one"), expected, 5e-5)
    same(found["from one"], expected, 5e-5)
    for run in ("to one", "from one"):
        (note,) = [r for r in lines(place / run) if "note" in r]
        assert note["step"] == 5 and "generators start anew" in note["note"]


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_the_steps_since_the_checkpoint(found, long, place):
    resumed = json.loads((place / "killed" / "ran.json").read_text())[-1]["resumed_from"]
    assert resumed in ("step-00000003", "step-00000006")  # the second was written while steps 7 and 8 were taken
    assert long["killed"][0].losses == found["adamw"][0].losses
    assert all(torch.equal(x, found["adamw"][1][name]) for name, x in long["killed"][1].items())
    assert [r["step"] for r in lines(place / "killed")] == list(range(1, 13))


def test_what_is_not_finite_on_one_rank_stops_or_skips_on_all_and_is_named(found, place, tmp_path):
    for said in ("step 5: ", "batch 9 has the loss", "not finite, on batch 9, is that of embed", "step-00000003"):
        assert said in found["bad"]
    alone = train(Poisoned(), bad_rows, replace(CONFIG, guard=Guard(skip=1)), tmp_path)
    assert found["skipped"][0].skipped == alone.skipped == (5,)
    assert found["skipped"][0].losses == pytest.approx(alone.losses, rel=1e-6, nan_ok=True)
    assert [r["skipped"][:11] for r in lines(place / "skipped") if "skipped" in r] == ["the loss is"]


def test_ranks_that_cannot_share_are_refused(found):
    assert found["odd"] == "batch: 3 rows cannot be dealt to shard = 2 ranks: expected a multiple"
    assert "Parallel(shard=3, sequence=1, tensor=1) on 2 ranks: shard × sequence × tensor must be 2" in found["sizes"]


def test_ranks_whose_directory_is_not_one_are_refused_before_anything_is_written(found, place):
    said, left = found["share"]
    assert re.fullmatch(
        rf"{place}/host 0/run: what rank 0 on \S+ writes there is not seen by rank 1 on \S+; expected one directory, on storage "
        "that all hosts share",
        said,
    )
    assert left == ["run"] and not any((place / "host 1").iterdir())
