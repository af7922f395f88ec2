"""A plan never takes more than it was given, uses what it was given, and is refused with the bytes where one request does not fit."""

import random

import pytest
import torch

from needlework.layers.state import Held, Part
from needlework.serve.planner import plan
from needlework.serve.pools import most_pages
from needlework.serve.sampling import Counts
from needlework.serve.tables import Tables

FIXED = Held({"S": Part((2, 16, 16), torch.float32)}, {})
ALL = Held({}, {"k": Part((2, 16), torch.bfloat16), "v": Part((2, 16), torch.bfloat16)})
WINDOW = ALL._replace(window=128)
KINDS = {"fixed": [FIXED] * 3, "rows": [ALL] * 3, "window": [WINDOW] * 3, "all": [FIXED, ALL, WINDOW, WINDOW]}
PAGE_OF_ALL = 64 * 2 * 2 * 16 * 2  # bytes


def made(held, config, vocabulary):
    """Bytes of the tables and of what penalties count in."""
    counts = Counts.zeros(config.slots, vocabulary, "meta")
    return Tables(held, config, "meta").bytes + sum(x.numel() * x.itemsize for x in counts) + 8 * (config.slots + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_fits_holds_one_full_request_and_leaves_no_room_for_another_page(kind):
    rng, held = random.Random(0), KINDS[kind]
    for _ in range(200):
        told = {
            "memory": rng.randrange(1 << 24), "weights": rng.randrange(1 << 20), "peak": rng.randrange(1 << 18), "graphs": 5000,
            "length": rng.randrange(1, 4000), "batch": rng.randrange(1, 200), "snapshots": rng.randrange(9),
            "budget": rng.choice([64, 512, 2048]), "vocabulary": rng.choice([1, 257, 50_000]),
        }  # fmt: skip
        left = told["memory"] - told["weights"] - told["peak"] - told["graphs"] - 8
        one = sum(
            PAGE_OF_ALL * sum(layer.window == window for layer in held if layer.rows)
            * most_pages(told["length"], window, 64, told["budget"])
            for window in {layer.window for layer in held if layer.rows}
        ) + sum(layer is FIXED for layer in held) * 2048 + 5 * told["vocabulary"] + 8  # fmt: skip
        if left < one:
            with pytest.raises(ValueError, match=f"needs {one:,} bytes.* leave {left:,}"):
                plan(held, **told)
            continue
        config = plan(held, **told)  # it is checked as it is made: each pool holds one full-length request
        assert config.nbytes - 8 <= left and made(held, config, told["vocabulary"]) == config.nbytes
        assert 1 <= config.batch <= told["batch"] and config.slots <= told["batch"] + told["snapshots"]
        assert config.batch == told["batch"] or config.slots == config.batch
        everything = config.slots * most_pages(told["length"], None, 64, 1)
        for window, pages, page_bytes in config.pools:
            if window is None:
                assert pages == everything or config.nbytes - 8 + page_bytes > left


def test_roomy_memory_gives_every_slot_a_full_length_request():
    config = plan(KINDS["all"], vocabulary=9, memory=1 << 30, weights=0, peak=0, graphs=0, length=1000, batch=8, snapshots=4)
    assert (config.batch, config.slots, config.prefix) == (8, 12, True)
    assert {window: pages for window, pages, _ in config.pools} == {None: 12 * 16, 128: 11 * 3 + 16}


def test_a_refusal_names_the_bytes():
    with pytest.raises(ValueError) as error:
        plan(
            [FIXED, WINDOW],
            vocabulary=300,
            memory=10_000_000,
            weights=9_000_000,
            peak=900_000,
            graphs=90_000,
            length=5000,
            batch=4,
        )
    assert str(error.value) == (
        "one request of 5000 tokens needs 290,276 bytes: a slot of 2,048 of states and 1,508 for sampling, and 35 pages of 8,192 for "
        "window 128; 10,000,000 bytes less 9,000,000 of weights, 900,000 of a step's peak, 90,000 of graphs and 8 of padding leave 9,992"
    )
