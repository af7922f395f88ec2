"""Every mixer on tables that an engine owns: what it serves is what it computes of whole sequences, whatever shares a step with them."""

import pytest
import torch

from needlework.layers.batch import Batch, Pages
from tests.layers.test_mixers import CONFIGS, DIM, build, close, sample

SLOTS, PG, NONE = 7, 16, -1


@pytest.fixture(params=CONFIGS, scope="module")
def config(request):
    return CONFIGS[request.param]


class Engine:
    """The smallest there is: tables full of NaN, a slot a sequence, and pages handed out in a mixed order."""

    def __init__(self, mixer, dtype, pages=24):
        self.mixer, self.held = mixer, mixer.held(dtype)
        filled = lambda shape, part: (
            torch.full(shape, torch.nan, dtype=part.dtype)
            if part.dtype.is_floating_point
            else torch.full(shape, 99, dtype=part.dtype)
        )
        self.tables = {name: filled((SLOTS, *part.shape), part) for name, part in self.held.fixed.items()}
        self.tables |= {name: filled((pages, PG, *part.shape), part) for name, part in self.held.rows.items()}
        self.free = torch.randperm(pages).tolist()
        self.owned: dict[int, list[int]] = {}
        self.seen: dict[int, int] = {}

    def row(self, slot, t):
        while len(self.owned[slot]) * PG <= t:
            self.owned[slot].append(self.free.pop())
        return self.owned[slot][t // PG] * PG + t % PG

    def leaves(self, before, slots, pages):
        """Nothing but these slots and pages has another byte than before."""
        for name, x in self.tables.items():
            others = torch.ones(len(x), dtype=torch.bool)
            others[slots if name in self.held.fixed else pages] = False
            assert torch.equal(before[name][others].view(torch.uint8), x[others].view(torch.uint8)), name

    def step(self, new):
        """new: [(slot or NONE, x [n D])], in which single tokens of sequences that have begun decode and come first."""
        decodes = 0
        slots, fresh, length, positions, rows, ends = [], [], [], [], [], [0]
        for i, (slot, x) in enumerate(new):
            if slot != NONE and slot not in self.seen:
                self.seen[slot], self.owned[slot] = 0, []
                begun = False
            else:
                begun = True
            if decodes == i and begun and len(x) == 1:
                decodes += 1
            else:
                ends.append(ends[-1] + len(x))
            at = range(self.seen[slot], self.seen[slot] + len(x)) if slot != NONE else range(len(x))
            slots.append(slot)
            fresh.append(not begun)
            positions += at
            rows += [self.row(slot, t) if slot != NONE else NONE for t in at]
            if slot != NONE:
                self.seen[slot] += len(x)
            length.append(self.seen[slot] if slot != NONE else NONE)
        tables = [list(self.owned.get(slot, [])) for slot, _ in new]
        if self.held.window is not None:  # what lies wholly before the window of every new token is somebody else's now
            for table, (slot, x) in zip(tables, new, strict=True):
                before = 0 if slot == NONE else max(0, self.seen[slot] - len(x) + 1 - self.held.window) // PG
                table[:before] = [NONE] * before
        most = max((len(table) for table in tables), default=0)
        block_table = torch.tensor([table + [NONE] * (most + 1 - len(table)) for table in tables], dtype=torch.int32)
        batch = Batch(
            decodes=decodes,
            slots=torch.tensor(slots),
            fresh=torch.tensor(fresh),
            cu_seqlens=torch.tensor(ends),
            length=torch.tensor(length, dtype=torch.int32),
            positions=torch.tensor(positions),
            pages={self.held.window: Pages(block_table, torch.tensor(rows))},
        )
        before = {name: x.clone() for name, x in self.tables.items()}
        with torch.no_grad():
            y = self.mixer.serve(torch.cat([x for _, x in new]), self.tables, batch)
        pages = torch.cat([torch.tensor(table, dtype=torch.long) for table in tables])
        self.leaves(before, torch.tensor([slot for slot, _ in new if slot != NONE]), pages[pages != NONE])
        return y.split([len(x) for _, x in new])


def served(mixer, steps, xs, pages=24):
    """y of each sequence, in steps of {slot: tokens}; a padded row decodes with every other one."""
    engine, at, found = Engine(mixer, next(iter(xs.values())).dtype, pages), {}, {slot: [] for slot in xs}
    for i, step in enumerate(steps):
        take = lambda slot, n: xs[slot][at.get(slot, 0) : at.get(slot, 0) + n]
        new = sorted(((slot, take(slot, n)) for slot, n in step.items()), key=lambda one: (len(one[1]) > 1, one[0] not in at))
        if i % 2:
            new.insert(0, (NONE, torch.full_like(next(iter(xs.values()))[:1], 3.0)))
        for (slot, x), y in zip(new, engine.step(new), strict=True):
            if slot != NONE:
                at[slot] = at.get(slot, 0) + len(x)
                found[slot].append(y)
    return {slot: torch.cat(parts) for slot, parts in found.items()}, engine


STEPS = (
    {2: 19},  # prefill alone
    {2: 1, 5: 1},  # a decode, and a prompt of one token
    {2: 1, 5: 1},
    {2: 1, 0: 33},  # decode beside a prompt
    {0: 2, 5: 15},  # two chunks that go on, one inside a content chunk
    {2: 1, 0: 1, 5: 1},
    {6: 40, 0: 3, 2: 1},
    {6: 1, 0: 1, 2: 1, 5: 1},
)


def test_what_is_served_is_what_whole_sequences_give(config):
    mixer = build(config)
    total = {}
    for step in STEPS:
        for slot, n in step.items():
            total[slot] = total.get(slot, 0) + n
    torch.manual_seed(2)
    xs = {slot: sample(n, B=1)[0] for slot, n in sorted(total.items())}
    found, engine = served(mixer, STEPS, xs)
    for slot, x in xs.items():
        whole, _ = mixer(x[None])
        assert close(found[slot], whole[0]), f"slot {slot}"
    for name in engine.held.fixed:  # nobody owned slots 1, 3 and 4
        for slot in (1, 3, 4):
            left = engine.tables[name][slot]
            assert left.isnan().all() if left.is_floating_point() else (left == 99).all(), name


def beside(mixer, others):
    """y of two sequences in a prompt's step and in two decoding ones, and the bytes of their slots and pages, beside `others`: slots, or
    NONE."""
    engine, y = Engine(mixer, torch.float64), []
    g = torch.Generator().manual_seed(3)
    tokens = lambda n: torch.randn(n, DIM, dtype=torch.float64, generator=g)
    engine.free = [*range(24)]
    for n in (19, 1, 1):
        own, theirs = [(slot, tokens(n)) for slot in (2, 5)], [(slot, tokens(n)) for slot in others]
        y += engine.step([*own, *theirs])[:2]
    rows = {name: [2, 5] if name in engine.held.fixed else engine.owned[2] + engine.owned[5] for name in engine.tables}
    return torch.cat(y), {name: x[rows[name]].view(torch.uint8) for name, x in engine.tables.items()}


def test_a_padded_row_is_to_the_others_as_any_other_row_is_bit_for_bit(config):
    """A step of fewer rows gives other bits on a CPU, whatever the layer: its BLAS multiplies few rows by another kernel, and what is left
    over of a vector goes through exp by another."""
    mixer = build(config)
    (y, held), (other_y, others_held) = beside(mixer, (NONE, NONE, NONE)), beside(mixer, (0, 3, 6))
    assert y.isfinite().all() and torch.equal(y, other_y)
    assert all(torch.equal(x, others_held[name]) for name, x in held.items())


def test_the_tables_hold_the_bytes_of_the_state(config):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        held = build(config).held(dtype)
        for T in (1, 100):
            rows = T if held.window is None else min(T, held.window)
            fixed = sum(torch.zeros(part.shape, dtype=part.dtype).nbytes for part in held.fixed.values())
            grown = rows * sum(torch.zeros(part.shape, dtype=part.dtype).nbytes for part in held.rows.values())
            assert 0 <= held.nbytes(T) - fixed - grown <= 8
