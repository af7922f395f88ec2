"""LUCID's decoding in one pass, in Triton's interpreter: against the definition, on the pages and lengths of test_lucid_decode.py."""

import os
from functools import partial

import pytest
import torch

from needlework.layers import Attention, Lucid, Rope
from needlework.ops.lucid import paged_lucid
from needlework.ops.lucid.arguments import LucidInputs
from needlework.ops.paged.placement import Placement
from needlework.ops.runtime.launch_configs import forced, rows
from needlework.testing import operators
from needlework.testing.compare import EXACT, leaves, make, poisoned, relative
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.lucid_decode import LUCID_DECODE
from needlework.testing.rows import chosen
from tests.layers.test_mixers import build, close, sample
from tests.layers.test_serving import served

from .test_lucid_decode import agree, copied, laid_out, with_beta

pytest.importorskip("triton")
from needlework.ops.lucid.decode.op import splits_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
# precondition, window and solve, programs, page, tile of keys, runs: one split and many, tiles of a page, pages of tiles, runs of pages
FORMS = (
    ("key", None, "window", 1, 16, 16, 1),
    ("beta", 5, "window", 400, 32, 32, 2),
    ("rowmax", 17, "global", 400, 48, 16, 1),
    ("qk", 1, "window", 1, 16, 32, 2),
    ("rowmax", None, "window", 400, 16, 16, 1),
    ("key", 17, "global", 1, 16, 64, 2),
    ("beta", None, "window", 1, 48, 32, 1),
)


def launched(programs, BN=16, RUNS=1):
    return forced("lucid/decode", shared={"programs": programs}, attend={"BN": BN, "RUNS": RUNS})


@pytest.mark.parametrize("precondition, window, solve, programs, PG, BN, RUNS", chosen(FORMS, FORMS[:6]))
def test_one_pass_is_the_definition(precondition, window, solve, programs, PG, BN, RUNS):
    """Sequences of one token, of none, and padded ones among them; torch.empty gives NaN."""
    with launched(programs, BN, RUNS), poisoned():
        given = laid_out((70, 1, 0, 17, -1), PG=PG, window=window, solve=solve)
        agree(with_beta(given, precondition) | {"scale": 0.3}, "triton")


@pytest.mark.parametrize("K, V, G, programs", ((3, 5, 1, 1), (40, 24, 15, 400), (136, 16, 3, 1)))
def test_any_width_and_group_is_the_definition(K, V, G, programs):
    with launched(programs):
        agree(with_beta(laid_out((40, 2), 1, G, K, V), "key"), "triton")


@pytest.mark.parametrize("window", (None, 20))
def test_pages_are_found_past_those_that_are_held_at_a_time(window):
    """Of 34 pages the last two are another load's; the window begins among them."""
    with launched(1):
        agree(with_beta(laid_out((543,), 1, 1, window=window), "key"), "triton")


def test_a_sequence_does_not_depend_on_the_others():
    """To the bit: whatever the others of a batch are."""
    given = with_beta(laid_out((40, 33, 70), dtype=torch.float16), "key")
    others = {name: torch.cat((given[name][:1], given[name][1:].flip(0))) for name in ("q", "k", "v")}
    rows = torch.tensor([given["rows"][0], -1, given["block_table"][2, 0] * 16 + 1])
    others |= {"length": torch.tensor([40, -1, 2]), "rows": rows}
    found = []
    for own in (copied(given), copied(given | others)):
        with launched(400):
            o = paged_lucid(**own, impl="triton")
        found.append((o[0], own["y_pages"].flatten(0, 1)[rows[0]]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_strides_of_tokens_are_free():
    """q, k and v are parts of one product, as a layer's are."""
    given = with_beta(laid_out((40, 3)), "key")
    line = torch.cat([given[name].flatten(1) for name in ("q", "k", "v")], 1)
    parts = line.split([given[name][0].numel() for name in ("q", "k", "v")], 1)
    views = {name: part.view_as(given[name]) for name, part in zip(("q", "k", "v"), parts, strict=True)}
    assert not views["v"].is_contiguous()
    agree(given | views, "triton")


def test_splits_fill_the_machine_and_follow_from_shapes():
    splits = partial(splits_of, programs=264, dense=528, LONG=16)
    assert splits(4, 10) == 10, "one sequence: a tile each"
    assert splits(4, 258) == 66 and splits(4, 2112) == 132, "and as many as the machine holds once they are long"
    assert splits(256, 10) == 1, "short ones are one program each, and no merge"
    assert splits(256, 258) == 2
    assert splits(2048, 258) == 1


@pytest.mark.parametrize("N, launches", ((1, [("attend", 2 * 5), ("merge", 4)]), (24, [("attend", 24 * 2)])))
def test_nothing_is_read_back_and_there_are_two_launches_at_most(N, launches, monkeypatch):
    """Meta tensors have no values to read."""
    from needlework.ops.lucid.decode import op

    grids = []
    monkeypatch.setattr(op, "run", lambda kernel, grid, *_, **constants: grids.append((kernel.__name__, *grid)))
    empty = lambda *sizes, dtype=torch.float32: torch.empty(*sizes, dtype=dtype, device="meta")
    tokens = LucidInputs(empty(N, 2, 16), empty(N, 2, 24), None)
    pages = empty(40, 16, 2, 16), empty(40, 16, 2, 24)
    where = Placement(empty(N, 5, dtype=torch.int32), empty(N, dtype=torch.int32), empty(N), None)
    with launched(24):
        op._launch(empty(N, 4, 16), tokens, *pages, where, op.Rule(False, False, False, 1.0), op.ALL, op.ALL)
    assert grids == launches


def test_every_launch_config_cuts_tiles_into_runs_that_a_product_takes():
    for row in rows("lucid/decode"):
        own = row.launch["attend"]
        assert row.why and own["BN"] % own["RUNS"] == 0 and own["BN"] // own["RUNS"] >= 16


@pytest.mark.parametrize(
    "name, dtype, style",
    chosen(
        [(spec.name, dtype, style) for spec in LUCID_DECODE for dtype in (torch.float16, torch.float32) for style in spec.styles],
        [("lucid/window-decode", torch.float16, "clustered"), ("lucid/decode", torch.float32, "random")],
    ),
)  # fmt: skip
def test_the_error_is_within_its_budget(name, dtype, style):
    spec = next(spec for spec in LUCID_DECODE if spec.name == name)
    kept, wide, single = stored(make(spec, 2, 60, style=style), dtype, spec.half)
    form = lambda call, x, **settings: dict(leaves(call(**x, **settings)))
    with forced("lucid/solve", "plain", shared={"C": 64}):
        fast = form(spec.chunk, kept, impl="triton")
    definition = form(spec.recurrent, single, operand=operand(dtype))
    literal = form(spec.literal, single, operand=operand(dtype), chunk_size=64)
    assert_within_budget(over_budget(fast, form(spec.recurrent, wide), definition, literal))


def test_the_operator_is_registered_and_compiles():
    given = with_beta(laid_out((20, 3), Hkv=1), "beta")
    own = copied(given)
    own |= {
        name: own[name].nan_to_num().contiguous() for name in ("k_pages", "y_pages")
    }  # opcheck compares, and copies what is mutated
    with operators.record_custom_ops() as calls:
        paged_lucid(**own, impl="triton")
    ((op, args, kwargs),) = calls.values()
    torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    call = lambda q: paged_lucid(**(own | {"q": q}), impl="triton")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert relative(compiled(own["q"]), call(own["q"])) <= EXACT


@pytest.mark.parametrize("attend", (Lucid(window=9, solve="global", precondition="beta"),), ids=str)
def test_a_layer_decodes_in_one_pass(attend, monkeypatch):
    """Heads of 68, LUCID's published width, which no tile has: prefill, decode beside a prompt, and decode alone."""
    mixer = build(Attention(heads=2, kv_heads=1, head_dim=68, attend=attend, position=Rope()))
    xs = {slot: sample(n, B=1, seed=slot)[0] for slot, n in ((0, 20), (1, 5))}
    whole = {slot: mixer(x[None])[0][0] for slot, x in xs.items()}
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    with operators.record_custom_ops() as calls:
        found, _ = served(mixer, ({0: 18}, {0: 1, 1: 4}, {0: 1, 1: 1}), xs)
    assert "needlework::lucid_attend" in calls and "needlework::lucid_decode" not in calls
    assert all(close(found[slot], y) for slot, y in whole.items())
