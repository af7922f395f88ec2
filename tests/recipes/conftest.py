"""The second study in small: its text, its models and its recipes at sizes that a CPU trains in seconds."""

import ast
import dataclasses

import pytest

from needlework.data import Archive, StoreConfig
from needlework.data.gather import Gathered, Split, gather
from needlework.experiment.answers import Context
from needlework.experiment.capacity import Capacity, WarmUp
from needlework.experiment.fork import Fork
from needlework.experiment.gate import Gate

NARROW = {"heads": 2, "kv_heads": 1, "key_dim": 8, "value_dim": 8, "head_dim": 8, "content_chunk": 8, "hidden": 24}


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """Twelve packages of real text, on the four sides; bytes are its tokens."""
    folder = tmp_path_factory.mktemp("archive")
    with open(ast.__file__, encoding="utf-8") as file:
        text = file.read()
    documents = [(f"{i}", text[i * 600 : (i + 1) * 600]) for i in range(90)]
    packages = [Gathered(chr(97 + p), f"{p} 1", "MIT", documents[p::12]) for p in range(12)]
    gather(packages, folder, Split(held_out=0.2, development=0.2, other=("a",)), 0.2)
    return StoreConfig(source=Archive(path=str(folder)), tokenizer="bytes")


def narrow(config):
    """A component's dict with every size small; a rank of 0 and what it composes stay."""
    if not isinstance(config, dict):
        return config
    small = NARROW | {"rank": min(config.get("rank") or 0, 2)}
    return {k: small[k] if k in small and v is not None else narrow(v) for k, v in config.items()}


def in_small(job, corpus, steps=4):
    """The job with one narrow layer of each kind and few short rows; what it trains on, asks and compares stays."""
    if isinstance(job, Fork):
        return Fork(trunk=in_small(job.trunk, corpus, 6), branches=tuple(in_small(b, corpus, 3) for b in job.branches))
    letters = "".join(dict.fromkeys(job.model.layout))
    parts = {"mixers": narrow(job.model.mixers), "mlp": narrow(job.model.mlp) if job.model.mlp else None}
    schedule = dataclasses.replace(job.train.schedule, warmup=1)
    train = dataclasses.replace(job.train, steps=steps, schedule=schedule, checkpoint_every=2, compile=False)
    if isinstance(job, Capacity):
        model = job.model.replaced(**parts, vocab_size=64, hidden_size=16, layout=letters)
        warm_up = WarmUp(steps=2, pairs=(1, 2), length=16)
        return dataclasses.replace(job, model=model, pairs=(2, 4), length=32, batch=4, rows=6, warm_up=warm_up, train=train)
    model = job.model.replaced(**parts, vocab_size=257, hidden_size=16, layout=letters)
    e, task = job.evaluate, {"dense_pairs": (1, 2), "sparse_pairs": (1, 1)}
    shrink = lambda mix: dataclasses.replace(mix, **task) if hasattr(mix, "sparse_pairs") else mix
    phases = [dataclasses.replace(phase, batch=2, length=96, task=shrink(phase.task)) for phase in job.phases]
    if len(phases) > 1:  # the gate lies above what a model knows at its start
        gate = {"until": Gate(excess=9.0, window=1)} if phases[0].until else {}
        phases = [dataclasses.replace(phases[0], steps=steps - 2, **gate), dataclasses.replace(phases[1], steps=2)]
    else:
        phases = [dataclasses.replace(phases[0], steps=steps)]
    evaluate = dataclasses.replace(
        e, lengths=(96, 192)[: len(e.lengths)], tokens=192, rows=2,
        recall=e.recall and shrink(e.recall), context=e.context and Context(rows=2, length=96, early=(0, 20), late=(40, 96)),
    )  # fmt: skip
    return dataclasses.replace(
        job,
        model=model,
        corpus=corpus,
        phases=tuple(phases),
        train=dataclasses.replace(train, autocast=None),
        evaluate=evaluate,
    )


@pytest.fixture(scope="session")
def small(archive):
    return lambda job, steps=4: in_small(job, archive, steps)
