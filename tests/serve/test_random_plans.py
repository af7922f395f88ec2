"""Random requests, cancels, stops and failures on pools that are too small: every answer is right, and the pools get all back."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest

from needlework.serve.request import Request
from needlework.serve.scheduler import Scheduler

from .device import HELD, VOCABULARY, Device, answer, config

FIXED = HELD[:1]
CASES = {
    "roomy": {"requests": 8},
    "tight": {"requests": 1, "host_bytes": 1 << 14},
    "tight-little-host-memory": {"requests": 1.5, "host_bytes": 2500},
    "no-host-memory": {"requests": 1, "batch": 6},
    "pages-cut-inside": {"requests": 1.5, "align": 24, "host_bytes": 1 << 14},
    "one-slot": {"batch": 1, "slots": 1, "requests": 1},
    "no-prefix": {"prefix": False, "requests": 1, "host_bytes": 1 << 14},
    "one-chunk": {"budget": 128, "requests": 2},
    "slots-only": {"held": FIXED, "slots": 5},
    "no-page-of-two": {"prefix": False, "shared": False, "requests": 1.5, "host_bytes": 1 << 14},
}


def requests(rng, n, length):
    """Some begin alike."""
    openings = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(20, 80))] for _ in range(3)]
    for i in range(n):
        opening = rng.choice([[], [], *openings])
        prompt = opening + [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1, 5, 20]))]
        stop = frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 3])))
        most = rng.randrange(1, length - len(prompt) + 1)
        yield Request(id=str(i), prompt=tuple(prompt), max_tokens=most, stop_tokens=stop)


def check(scheduler, device):
    """Every slot and page has the owners that the counts say, and what is parked is in host memory."""
    snapshots = list(scheduler.memory.snapshots.prefix._snapshots.values())
    slots = [seq.slot for seq in scheduler.running] + [snapshot.slot for snapshot in snapshots]
    assert len(set(slots)) == len(slots) == scheduler.memory.slots.count - scheduler.memory.slots.free
    for window, pool in scheduler.memory.pages.items():
        owners = Counter(page for x in (*scheduler.running, *snapshots) for page in x.pages[window] if page >= 0)
        assert [owners[page] for page in range(pool.count)] == pool.owners
        assert pool.free == pool.owners.count(0)
    waiting = [seq.arrival for seq in scheduler.waiting]
    assert waiting == sorted(waiting) and all(seq.slot < 0 for seq in scheduler.waiting)
    assert len(scheduler) == len(scheduler.waiting) + len(scheduler.running)
    assert scheduler.memory.host_bytes == sum(seq.parked for seq in scheduler.waiting) <= scheduler.config.host_bytes
    assert len(scheduler.running) <= scheduler.config.batch


def check_step(step, scheduler, waited):
    align, given = scheduler.config.align, scheduler.config.budget
    assert sum(len(row.tokens) for row in step.prefills) <= given
    for row in step.prefills:
        assert row.start % align == 0 and (row.last or row.length % align == 0)
    rows = [row.request.id for row in (*step.decodes, *step.prefills)]
    assert len(set(rows)) == len(rows) > 0
    admitted = [seq for seq in waited if seq.slot >= 0]
    assert admitted == waited[: len(admitted)], "a request overtook another"


def play(seed, case, n=40):
    rng, options = random.Random(seed), CASES[case]
    held = options.get("held", HELD)
    plan = config(**options)
    scheduler, device = Scheduler(plan), Device(plan, held)
    coming = deque(requests(rng, n, plan.length))
    flight, answers, ended, seen = deque(), {}, {}, Counter()

    def report():
        step, sampled = flight.popleft()
        finished = {id for id, token in sampled.items() if id in answers and token in answers[id][0].stop_tokens}
        for id, token in sampled.items():
            if id not in ended:
                answers[id][1].append(token)
                if id in finished or len(answers[id][1]) == answers[id][0].max_tokens:
                    ended[id] = "right"
        scheduler.done(step, sampled, finished)

    for _ in range(20_000):
        if coming and rng.random() < 0.4:
            request = coming.popleft()
            group = [replace(request, id=f"{request.id}-{i}") for i in range(rng.choice([1, 1, 1, 2, 4]))]
            answers |= {one.id: (one, []) for one in group}
            scheduler.add(*group)
        if rng.random() < 0.03 and (alive := sorted(answers.keys() - ended.keys())):
            chosen = rng.choice(alive)
            ended[chosen] = "cancelled"
            scheduler.cancel(chosen)
        waited = list(scheduler.waiting)
        step = scheduler.step()
        check(scheduler, device)
        if step is not None:
            check_step(step, scheduler, waited)
            seen.update(type(move).__name__ for move in (*step.before, *step.after))
            seen["forks"] += sum(len(row.forks) for row in step.prefills)
            if rng.random() < 0.01:
                while flight:
                    report()
                device.fail(step, rng.randrange(len(step.before) + 1))
                if (lost := scheduler.failed(step)) is not None:
                    ended[lost.id] = "failed"
                seen["failed"] += 1
                check(scheduler, device)
            else:
                flight.append((step, device.run(step)))
        elif not flight:
            assert not len(scheduler), "nothing runs, and nothing is in flight"
        while flight and (step is None or len(flight) > 1 or rng.random() < 0.5):
            report()
            check(scheduler, device)
        if not coming and not flight and not len(scheduler):
            break
    else:
        raise AssertionError("requests are left")
    for id, (request, tokens) in answers.items():
        if ended[id] == "right":
            assert tokens == answer(request), id
    while scheduler.memory.snapshots.evict():
        pass
    assert scheduler.memory.slots.free == plan.slots and scheduler.memory.host_bytes == 0
    assert all(pool.free == pool.count for pool in scheduler.memory.pages.values())
    parked = {move.id for move in scheduler.memory.moves}
    assert device.tables._parked.keys() <= parked, "host memory is left"
    return seen


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_right_and_the_pools_get_all_back(case):
    seen = sum((play(seed, case) for seed in range(6)), Counter())
    expected = {
        "roomy": {"CopySlot", "failed"},
        "tight": {"CopySlot", "Park", "Unpark", "Drop"},
        "tight-little-host-memory": {"Park", "Unpark"},
        "pages-cut-inside": {"CopySlot", "CopyPage", "Park", "Unpark"},
        "no-prefix": {"Park", "Unpark"},
        "slots-only": {"CopySlot"},
        "no-page-of-two": {"CopySlot", "CopyPage", "Park", "Unpark"},
    }
    assert bool(seen["forks"]) is (case != "one-slot")
    assert expected.get(case, set()) <= seen.keys()
    assert case not in ("no-host-memory", "one-slot") or not {"Park", "Unpark"} & seen.keys()
