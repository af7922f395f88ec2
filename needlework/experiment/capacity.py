"""A capacity run: a small model learns associative recall at several loads at once, and is asked at each of them.

Batches are drawn on the device, so that many such runs share a GPU without waiting for a host. Step s has the load s mod their number.
The first steps have few pairs in short rows, as many tokens a step: there every mixer learns to recall at all, soon and at about the same time.
A run trains and is measured in one go, and keeps no weights.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from needlework.data import MQAR, Batch
from needlework.eval.retrieval import answered
from needlework.experiment.claim import write_json
from needlework.experiment.reader import reader
from needlework.experiment.runner import state_bytes
from needlework.fields import Count, fit
from needlework.json_file import read_json
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.train import Progress, TrainConfig, alone, train

ASKED = 1 << 20  # the seed of what is asked, apart from any run's


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The first `steps` steps have these loads, in rows of this length."""

    steps: Count
    pairs: tuple[Count, ...]
    length: Count

    def __post_init__(self):
        fit("warm_up", self)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """All that fixes a run. name is the run's, title is for reading.

    pairs: the loads, so many keys a row. power: MQAR's. length, batch: of a row, of a step. rows: asked at each load.
    impl: "torch" computes every op in plain PyTorch, also where there are kernels; "auto" as everywhere.
    Raises ValueError for a load that does not fit its length, for micro-batches, for a warm-up that is all of the training, and where its
    rows do not divide a step's tokens.
    """

    name: str
    title: str
    model: NeedleworkConfig
    pairs: tuple[Count, ...]
    length: Count
    batch: Count
    warm_up: WarmUp
    train: TrainConfig
    rows: Count = 256
    power: float = 0.01
    impl: Literal["auto", "torch"] = "auto"

    def __post_init__(self):
        fit("capacity", self)
        if self.train.accumulate != 1:
            raise ValueError(f"capacity: train.accumulate is {self.train.accumulate}, expected 1")
        if self.warm_up.steps >= self.train.steps:
            raise ValueError(
                f"capacity: warm_up.steps is {self.warm_up.steps}, expected fewer than train.steps, {self.train.steps}"
            )
        if self.batch * self.length % self.warm_up.length:
            raise ValueError(
                f"capacity: warm_up.length is {self.warm_up.length}, expected a divisor of {self.batch} x {self.length}"
            )
        for length, loads in ((self.length, self.pairs), (self.warm_up.length, self.warm_up.pairs)):
            for pairs in loads:
                self.task(pairs).batch(0, 0, 1, length)

    def task(self, pairs: int) -> MQAR:
        return MQAR(vocab=self.model.vocab_size, pairs=pairs, power=self.power)

    def batch_of(self, step: int, device: torch.device) -> Batch:
        """A pure function of the run, the step and the device."""
        warm = self.warm_up if step < self.warm_up.steps else None
        pairs, length = (warm.pairs, warm.length) if warm else (self.pairs, self.length)
        rows = self.batch * self.length // length
        return self.task(pairs[step % len(pairs)]).drawn(device, self.train.seed, step, rows, length)

    def tokens(self) -> int:
        """Training tokens."""
        return self.train.steps * self.batch * self.length

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, complete."""
        fields = ("name", "title", "pairs", "length", "batch", "rows", "power", "impl")
        return {name: getattr(self, name) for name in fields} | {
            "warm_up": asdict(self.warm_up),
            "model": self.model.to_diff_dict(),
            "train": asdict(self.train),
        }

    def resume_fingerprint(self) -> dict[str, Any]:
        """The fields that a resumed run must share with the run it resumes."""
        return self.to_dict() | {"train": self.train.resume_fingerprint()}


def run_capacity(
    job: Capacity, directory: Path, on_step: Callable[[Progress], None] | None = None, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Trains and measures one run in `directory`, from where an earlier call stopped; None if it was stopped.

    Raises InUse if another process runs there, and what `train` raises.
    """
    done = directory / "result.json"
    if done.exists():
        return read_json(done)
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with alone(directory), computed_by(job.impl):
        torch.manual_seed(job.train.seed)
        # transformers wraps `to` as a function, and the checker takes its first argument for the model
        model = NeedleworkForCausalLM(job.model).to(device)  # pyrefly: ignore[bad-argument-type]
        described = job.to_dict()
        described.pop("train")
        result = train(
            model,
            lambda step: job.batch_of(step, device),
            job.train,
            directory / "training",
            recipe=described,
            on_step=on_step,
            stop=stop,
        )
        if result.stopped:
            return None
        loads = {str(pairs): _asked(job, job.task(pairs), model, device) for pairs in job.pairs}
    start = read_json(directory / "training" / "ran.json")[-1]
    mean = lambda name: fmean(load[name] for load in loads.values())
    entry = {
        "name": job.name,
        "seed": job.train.seed,
        "title": job.title,
        "lengths": [job.length],
        "tasks": [],
        "loss": {str(job.length): mean("nll")},
        "parameters": model.num_parameters(),
        "state_bytes": {str(job.length): state_bytes(model, job.length, torch.bfloat16)},  # as it would be served
        "train": {
            "tokens": result.tokens,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "loss": list(result.losses),
        },
        "capacity": {"accuracy": mean("accuracy"), "nll": mean("nll"), "loads": loads},
        "machine": start["device"],
        "versions": start["versions"],
        "commit": start["commit"],
        "config": job.to_dict(),
    }
    write_json(done, entry)
    return entry


def _asked(job: Capacity, task: MQAR, model: NeedleworkForCausalLM, device: torch.device) -> dict[str, float]:
    """Share and nats of the values of `rows` rows that no run was trained on."""
    batch = task.drawn(device, ASKED, 0, job.rows, job.length)
    read = reader(model) if job.train.autocast == "bf16" else lambda ids: model(ids, use_cache=False).logits
    right, nats = answered(read, batch.input_ids, batch.labels, batch_size=64)
    return {"accuracy": right.double().mean().item(), "nll": nats.mean().item()}


@contextmanager
def computed_by(impl: str) -> Iterator[None]:
    """Inside the `with` block "auto" is `impl`, in this process."""
    before = os.environ.get("NEEDLEWORK_IMPL")
    if impl != "auto":
        os.environ["NEEDLEWORK_IMPL"] = impl
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("NEEDLEWORK_IMPL", None)
        else:
            os.environ["NEEDLEWORK_IMPL"] = before
