"""Tables hold what layers ask for and no more; copies and parking keep every bit of every dtype, and touch nothing else."""

import pytest
import torch

from needlework.layers.state import Held, Part
from needlework.serve.capacity import Pool, SchedulerConfig
from needlework.serve.step import CopyPage, CopySlot, Drop, Park, Unpark
from needlework.serve.tables import Tables, page_lines, slot_line

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32, torch.int16,
    torch.uint8, torch.bool,
)  # fmt: skip
HELD = [
    Held({dtype.__str__(): Part((3, 5), dtype) for dtype in DTYPES}, {}),
    Held({"count": Part((), torch.int64)}, {dtype.__str__(): Part((2, 3), dtype) for dtype in DTYPES}),
    Held({}, {"k": Part((), torch.float32)}, 32),
    Held({}, {"k": Part((4,), torch.bfloat16)}, 32),
]


def config(held, slots=4, pages=7, page=16):
    pools = tuple(Pool(window, pages + i, line.nbytes) for i, (window, line) in enumerate(page_lines(held, page).items()))
    return SchedulerConfig(
        length=64, batch=2, slots=slots, slot_bytes=slot_line(held).nbytes, pools=pools, page=page, budget=64, host_bytes=0
    )


@pytest.fixture
def tables():
    """Any bits in every tensor."""
    made = Tables(HELD, config(HELD), "cpu")
    for table in (made.slots, *made.pages.values()):
        table.copy_(torch.randint(256, table.shape, generator=torch.Generator().manual_seed(0)))
    return made


def bits(tables):
    """A copy of every layer's tensors as bytes, [slots or pages, bytes] each."""
    return {
        (i, name): torch.stack([line.contiguous().reshape(-1).view(torch.uint8) for line in x]).clone()
        for i, layer in enumerate(tables.layers)
        for name, x in layer.items()
    }


def of(layer, name):
    """Whether a tensor lies in slots, and its window."""
    return name in HELD[layer].fixed, HELD[layer].window


def test_each_layer_has_its_tensors_by_name_shape_and_dtype_each_slot_and_page_contiguous(tables):
    for layer, own in zip(HELD, tables.layers, strict=True):
        assert own.keys() == layer.fixed.keys() | layer.rows.keys()
        for name, part in layer.fixed.items():
            assert own[name].shape == (4, *part.shape) and own[name].dtype == part.dtype and own[name][1].is_contiguous()
        for name, part in layer.rows.items():
            pages = 7 if layer.window is None else 8
            assert (
                own[name].shape == (pages, 16, *part.shape) and own[name].dtype == part.dtype and own[name][1].is_contiguous()
            )


def test_no_two_tensors_share_a_byte(tables):
    before = bits(tables)
    for i, own in enumerate(tables.layers):
        for name, x in own.items():
            x.copy_(torch.zeros_like(x))
            after = bits(tables)
            assert not after[i, name].any()
            assert all(torch.equal(after[key], before[key]) for key in before if key != (i, name))
            before = after


def test_a_copied_slot_is_equal_in_every_layer_and_nothing_else_changes(tables):
    before = bits(tables)
    tables.move([CopySlot(2, 0)])
    for (layer, name), after in bits(tables).items():
        expected = before[layer, name]
        if of(layer, name)[0]:
            expected[0] = expected[2]
        assert torch.equal(after, expected)


@pytest.mark.parametrize("window", [None, 32])
def test_a_copied_page_is_equal_in_every_layer_of_its_window_and_nothing_else_changes(tables, window):
    before = bits(tables)
    tables.move([CopyPage(window, 1, 6)])
    for (layer, name), after in bits(tables).items():
        expected = before[layer, name]
        if of(layer, name) == (False, window):
            expected[6] = expected[1]
        assert torch.equal(after, expected)


def test_what_was_parked_comes_back_bit_for_bit_in_another_slot_and_other_pages(tables):
    before = bits(tables)
    tables.move([Park("a", 1, {None: (5, 0, 2), 32: (3,)})])
    tables.slots.fill_(0xFF)
    for table in tables.pages.values():
        table.fill_(0xFF)
    tables.move([Unpark("a", 3, {None: (1, 4, 5), 32: (0,)})])
    lines = {(True, None): {3: 1}, (True, 32): {}, (False, None): {1: 5, 4: 0, 5: 2}, (False, 32): {0: 3}}
    for (layer, name), after in bits(tables).items():
        to = lines[of(layer, name)]
        for i, line in enumerate(after):
            assert torch.equal(line, before[layer, name][to[i]] if i in to else torch.full_like(line, 0xFF))


def test_parked_memory_is_what_the_scheduler_counts_and_is_gone_once_taken_back_or_dropped(tables):
    parked = tables.park(0, {None: (1, 2), 32: ()})
    pools = {pool.window: pool.page_bytes for pool in config(HELD).pools}
    assert sum(x.numel() for x in (parked.slot, *parked.pages.values())) == config(HELD).slot_bytes + 2 * pools[None]
    tables.move([Park("a", 0, {None: (), 32: ()}), Park("b", 1, {None: (), 32: ()}), Drop("b"), Drop("c")])
    tables.move([Unpark("a", 0, {None: (), 32: ()})])
    assert not tables._parked


def test_moves_are_made_in_their_order(tables):
    a, b = (tables.slots[i].clone() for i in (0, 1))
    tables.move([CopySlot(0, 2), CopySlot(1, 0), CopySlot(2, 1)])
    assert torch.equal(tables.slots[0], b) and torch.equal(tables.slots[1], a)


def test_bytes_are_those_that_layers_hold_within_one_per_cent():
    # 24 layers: a memory with its convolution; attention that sees all; attention in a window
    memory = Held({"S": Part((4, 64, 128), torch.float32), "conv": Part((3, 1000), torch.bfloat16)}, {})
    rows = {"k": Part((4, 64), torch.bfloat16), "v": Part((4, 64), torch.bfloat16)}
    held = [memory, Held({}, rows), Held({"m": Part((4, 3), torch.float32)}, rows, 256)] * 8
    slots, tokens = 3, 512
    lines = page_lines(held, 64)
    pools = tuple(Pool(window, slots * min(tokens, window or tokens) // 64, line.nbytes) for window, line in lines.items())
    plan = SchedulerConfig(length=256, batch=1, slots=slots, slot_bytes=slot_line(held).nbytes, pools=pools, budget=64)
    tables = Tables(held, plan, "meta")
    asked = slots * sum(layer.nbytes(tokens) for layer in held)
    assert abs(tables.bytes - asked) < 0.01 * asked
    assert tables.bytes == slots * plan.slot_bytes + sum(pages * page_bytes for _, pages, page_bytes in pools)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: pinned memory and copies on a stream")
def test_parking_on_a_gpu_is_bit_exact_and_waits_for_nothing():
    tables = Tables(HELD, config(HELD), "cuda")
    for table in (tables.slots, *tables.pages.values()):
        table.random_(0, 256)
    slot, pages = tables.slots[1].clone(), tables.pages[None][[5, 0]].clone()
    torch.cuda.set_sync_debug_mode("error")
    tables.move([Park("a", 1, {None: (5, 0), 32: ()})])
    tables.slots.fill_(0xFF)
    tables.pages[None].fill_(0xFF)
    tables.move([Unpark("a", 0, {None: (2, 3), 32: ()}), CopySlot(0, 2), CopyPage(None, 3, 6)])
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tables.slots[2], slot) and torch.equal(tables.pages[None][[2, 6]], pages)
