"""From a model to a running engine: what it may take of the machine is measured, planned, allocated and captured."""

import math
from dataclasses import dataclass

from needlework.fields import Count, Natural, Portion, fit
from needlework.models import NeedleworkForCausalLM
from needlework.serve.capacity import SchedulerConfig
from needlework.serve.compiled import EAGER, compiled
from needlework.serve.costs import PAGE, costs
from needlework.serve.engine import Engine
from needlework.serve.grammar import maker
from needlework.serve.planner import plan
from needlework.serve.runner import Runner
from needlework.serve.scheduler import Scheduler
from needlework.serve.tables import Tables
from needlework.serve.text import Text

CUT = 64  # tokens: a prompt is cut at its multiples, and at those of the layers' own chunks
SNAPSHOTS = 16  # slots of their own, which running requests do not have
BUDGET = {"cuda": 8192, "cpu": 512}  # tokens of prefill in a step: others' next tokens wait for them


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a server takes of its machine.

    length: tokens of the longest request, its answer included. batch: sequences that run at once. snapshots: slots for the beginnings
    that prompts share; 0: none are shared; None: one a sequence, at most 16, and 0 for a model that writes its pages again. memory: the
    share of the device's memory for weights, states and steps; None: 0.9 of a GPU's, half of a CPU's. parked: bytes of host memory for
    requests that make way for older ones. waiting: requests that may wait.
    """

    length: Count = 8192
    batch: Count = 64
    snapshots: Natural | None = None
    memory: Portion | None = None
    parked: Natural = 4 << 30
    waiting: Count = 1024

    def __post_init__(self):
        fit("room", self)


def start(model: NeedleworkForCausalLM, text: Text, room: Room) -> tuple[Engine, SchedulerConfig]:
    """The engine, which runs, and what it shares out. model: in evaluation mode, on its device.

    On a GPU decoding steps are compiled by torch.compile, whose cache makes a second start faster.

    Raises ValueError, with the bytes, where one request of `room.length` tokens does not fit; for a tokenizer of more tokens than the
    model has; and for snapshots of a model that writes its pages again.
    """
    if text.size > model.config.vocab_size:
        raise ValueError(f"the tokenizer has {text.size} tokens, expected at most the model's {model.config.vocab_size}")
    held = model.model.held()
    cut = math.lcm(CUT, *(one.cut for one in held))
    budget = max(cut, min(BUDGET[model.device.type], room.length))
    share = room.memory if room.memory is not None else 0.9 if model.device.type == "cuda" else 0.5
    traced = model.device.type == "cuda" and all(one.captured != "none" for one in held)
    passes = compiled() if traced else EAGER
    snapshots = room.snapshots
    if snapshots is None:
        snapshots = 0 if any(one.rewritten for one in held) else min(SNAPSHOTS, room.batch)
    taken = costs(model, share, tokens=budget, batch=room.batch, passes=passes)
    config = plan(
        held, **taken._asdict(), vocabulary=model.config.vocab_size, length=room.length, batch=room.batch, snapshots=snapshots, page=PAGE, align=cut,
        budget=budget, host_bytes=room.parked,
    )  # fmt: skip
    runner = Runner(model, Tables(held, config, model.device), config, passes)
    if runner.on_gpu:
        runner.capture(config.batch)
    return Engine(runner, Scheduler(config), waiting=room.waiting, grammar=maker(text, runner.vocabulary)), config
