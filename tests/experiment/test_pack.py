"""A pack keeps the results of many runs in one file, and a sweep does not run again what is in it."""

import dataclasses

import pytest
from rich.console import Console

from needlework.experiment.capacity import Capacity, WarmUp
from needlework.experiment.claim import plain
from needlework.experiment.pack import read_pack, slim, write_pack
from needlework.experiment.sweep import name_of, sweep
from needlework.layers import Delta, Recurrent
from needlework.models import NeedleworkConfig
from needlework.train import AdamW, Cosine, TrainConfig

OWN = """
import dataclasses
from {module} import JOB

def runs() -> "tuple[Capacity, ...]":
    return tuple(dataclasses.replace(JOB, train=dataclasses.replace(JOB.train, seed=seed)) for seed in (0, 1))
"""
JOB = Capacity(
    name="delta", title="Delta",
    model=NeedleworkConfig(
        vocab_size=32, hidden_size=16, layout="M", mixers={"M": Recurrent(heads=1, key_dim=8, value_dim=8, write=Delta())}
    ),
    pairs=(2, 3), length=16, batch=2, rows=4, warm_up=WarmUp(steps=1, pairs=(1,), length=8),
    train=TrainConfig(steps=3, seed=0, optim=AdamW(lr=1e-3), schedule=Cosine(), checkpoint_every=3),
)  # fmt: skip


def entry(seed, **more):
    return {
        "name": "delta",
        "seed": seed,
        "train": {"loss": [float(i) for i in range(1, 131)], "tokens": 9},
        "samples": ["x"],
    } | more


def test_curves_are_means_over_stretches_and_samples_are_left_out(tmp_path):
    found = slim(entry(0))
    assert "samples" not in found and found["train"]["tokens"] == 9
    assert (
        found["train"]["loss"][:2] == [2.0, 5.0]
        and found["train"]["steps"][:2] == [3, 6]
        and found["train"]["steps"][-1] == 130
    )
    assert len(found["train"]["loss"]) == len(found["train"]["steps"]) == 44 and slim(found) == found
    fork = slim({"name": "t", "seed": 0, "branches": {"a": entry(0), "b": {"ended": {}}}})
    assert fork["branches"] == {"a": found, "b": {"ended": {}}}
    assert slim({"name": "x", "seed": 1, "ended": {"step": 3}}) == {"name": "x", "seed": 1, "ended": {"step": 3}}
    assert slim(entry(0) | {"train": {"loss": []}})["train"]["loss"] == []


def test_a_pack_is_equal_bytes_of_equal_runs_and_torn_ones_are_named(tmp_path):
    write_pack(tmp_path / "a.jsonl.xz", {"delta-1": entry(1), "delta-0": entry(0)})
    write_pack(tmp_path / "b.jsonl.xz", {"delta-0": slim(entry(0)), "delta-1": entry(1)})
    assert (tmp_path / "a.jsonl.xz").read_bytes() == (tmp_path / "b.jsonl.xz").read_bytes()
    assert list(read_pack(tmp_path / "a.jsonl.xz")) == ["delta-0", "delta-1"] and read_pack(tmp_path / "none.jsonl.xz") == {}
    (tmp_path / "a.jsonl.xz").write_bytes((tmp_path / "a.jsonl.xz").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.jsonl\.xz: torn, or no JSON"):
        read_pack(tmp_path / "a.jsonl.xz")
    write_pack(tmp_path / "c.jsonl.xz", {"one": entry(0), "two": entry(0)})
    with pytest.raises(ValueError, match="2 lines are of 1 runs"):
        read_pack(tmp_path / "c.jsonl.xz")


def test_a_sweep_does_not_run_again_what_its_pack_has(tmp_path):
    """On a machine that has nothing but the pack; another config under the same name is refused as ever."""
    packed = {name_of(JOB): plain(entry(0, config=JOB.to_dict()))}
    write_pack(tmp_path / "pack.jsonl.xz", packed)
    quiet = Console(quiet=True)
    assert sweep((JOB,), tmp_path / "runs" / "c", quiet, 1, pack=tmp_path / "pack.jsonl.xz") == []
    assert (tmp_path / "runs" / "c" / "results" / "delta-0.json").exists()
    assert read_pack(tmp_path / "pack.jsonl.xz") == {"delta-0": slim(packed["delta-0"])}
    other = dataclasses.replace(JOB, power=0.5)
    with pytest.raises(Exception, match=r"is of another config \(power\)"):
        sweep((other,), tmp_path / "runs" / "d", quiet, 1, pack=tmp_path / "pack.jsonl.xz")


@pytest.mark.slow
def test_a_sweep_of_capacity_runs_goes_on_in_calls_and_gives_its_results_to_its_pack(needlework, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_job.py").write_text(open(__file__).read().split("def entry")[0])
    own, pack = tmp_path / "own.py", tmp_path / "pack.jsonl.xz"
    own.write_text(OWN.format(module="a_job"))
    call = ("sweep", f"{own}:runs", "--runs", tmp_path / "runs", "--workers", 1, "--pack", pack)
    assert "2 runs are left" in needlework(*call, "--minutes", 0)
    assert "all done" in needlework(*call)
    assert {name: e["seed"] for name, e in read_pack(pack).items()} == {"delta-0": 0, "delta-1": 1}
    assert "2 of 2 runs are done" in needlework(*call[:3], tmp_path / "elsewhere", *call[4:])
