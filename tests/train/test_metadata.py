"""A run's directory says what ran: ran.json."""

import json
import subprocess
from dataclasses import asdict, replace

import torch

from needlework.train import Parallel, metadata, train

from .tiny import CONFIG, Tiny, batch, stop_at


def entries(directory):
    return json.loads((directory / "ran.json").read_text())


def test_every_start_adds_what_ran_and_from_where(tmp_path):
    recipe = {"corpus": {"sha256": "abc"}}
    train(Tiny(), batch, CONFIG, tmp_path, recipe=recipe, stop=stop_at(4))
    train(Tiny(), batch, replace(CONFIG, tensorboard=False), tmp_path, recipe=recipe)
    first, second = entries(tmp_path)
    assert first["resumed_from"] is None and second["resumed_from"] == "step-00000004"
    assert first["config"] == json.loads(json.dumps(asdict(CONFIG) | {"recipe": recipe}))
    assert first["seed"] == CONFIG.seed and first["versions"]["torch"] == torch.__version__
    assert first["ranks"] == {"shard": 1, "sequence": 1, "tensor": 1} and first["device"] == "cpu" and first["threads"] == 1


def test_the_commit_is_that_of_the_checkout_and_dirty_if_anything_differs(tmp_path, monkeypatch):
    git = lambda *arguments: (
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True, text=True).stdout
    )
    monkeypatch.setattr(metadata, "ROOT", tmp_path)
    assert metadata.commit.__wrapped__() == {"commit": None}
    git("init", "-q")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "first")
    head = git("rev-parse", "HEAD").strip()
    assert metadata.commit.__wrapped__() == {"commit": head, "dirty": False}
    (tmp_path / "new.py").write_text("x = 1")
    assert metadata.commit.__wrapped__() == {"commit": head, "dirty": True}


def test_how_ranks_are_laid_out_is_told_but_may_change(tmp_path):
    train(Tiny(), batch, CONFIG, tmp_path, stop=stop_at(4))
    train(Tiny(), batch, replace(CONFIG, parallel=Parallel(shard=1)), tmp_path)
    assert [entry["config"]["parallel"]["shard"] for entry in entries(tmp_path)] == [-1, 1]
