"""LUCID's kernels by block table in Triton's interpreter, against the definition."""

import contextlib
import os
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.layers import Attention, Lucid, Rope, Softmax
from needlework.ops.lucid import solve_pages
from needlework.ops.runtime.launch_configs import forced
from needlework.testing.compare import leaves, make, poisoned
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.lucid_pages import LUCID_PAGES, Pages
from needlework.testing.rows import covering
from tests.layers.test_mixers import build, close, sample
from tests.layers.test_serving import served

from .test_lucid_pages import PRECONDITIONS, WINDOWS, agree, tokens

pytest.importorskip("triton")
from needlework.ops.lucid.solve.by_table import lucid_prefill
from needlework.ops.lucid.step import lucid_decode

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
ENDS = (
    0,
    40,
    40,
    88,
    89,
)  # blocks have 16 rows: sequences with a block that is not full, without tokens, of whole blocks, of one token
solved = partial(agree, impl="triton")


@pytest.mark.parametrize(
    "precondition, window, solve, PG", covering(PRECONDITIONS, WINDOWS, ("window", "global"), (16, 32, 48), pairs=False)
)
def test_prefill_in_parts_and_decoding_are_the_whole(precondition, window, solve, PG):
    solved(tokens(ENDS, precondition=precondition), ENDS, PG, precondition=precondition, window=window, solve=solve)


@pytest.mark.parametrize("K, V, H", ((3, 5, 1), (40, 24, 3), (136, 16, 1)))
def test_any_width_is_the_definition(K, V, H):
    solved(tokens((0, 25), H, K, V), (0, 25))


@pytest.mark.parametrize("precondition, window", covering(("beta", "rowmax"), (None, 40), pairs=False))
@pytest.mark.parametrize("programs", (1, 40, 1000))
def test_shares_of_the_pages_are_summed(programs, precondition, window):
    """64 keys a share at least: prefill splits three, decoding four."""
    read = {"read_pages": {"NP": programs}}
    with forced("lucid/step", **read), forced("lucid/pages", **read):
        solved(tokens((0, 300), H=1, precondition=precondition), (0, 300), precondition=precondition, window=window)


@pytest.mark.parametrize("config", ("plain-panels", "sm90"))
def test_every_way_to_solve_takes_what_the_pages_leave(config):
    small = {"panel": {"S": 2}} if config == "plain-panels" else {"shared": {"C": 16}}
    with forced("lucid/solve", config, **small):
        solved(tokens(ENDS, precondition="rowmax"), ENDS, precondition="rowmax")


@pytest.mark.parametrize("precondition", ("beta", "rowmax"))
def test_nothing_is_read_that_was_never_written(precondition):
    """torch.empty gives NaN."""
    with poisoned():
        solved(tokens(ENDS, precondition=precondition), ENDS, precondition=precondition)


def calls(x, pages, **settings):
    """A prefill of 20 tokens and the decoding of the next, as arguments."""
    rows = pages.rows(torch.zeros(21, dtype=torch.int64), torch.arange(21))
    where = lambda total: {"k_pages": pages.k, "y_pages": pages.y, "block_table": pages.table, "length": torch.tensor([total])}
    own = lambda part: dict(zip(("k", "v", "beta"), x.map(lambda t: t[part]), strict=True)) | {"rows": rows[part]} | settings
    return [
        own(slice(0, 20)) | where(20) | {"cu_seqlens": torch.tensor([0, 20])},
        own(slice(20, 21)) | where(21) | {"cu_seqlens": None},
    ]


def test_the_operators_pass_opcheck():
    x = tokens((0, 40), precondition="beta")
    pages = Pages.of(x.k, x.v, torch.tensor([40]))
    dense = pages._replace(k=pages.k.contiguous(), y=pages.y.contiguous())  # opcheck copies what is mutated
    prefill, decode = calls(x, dense)
    names = ("k", "v", "beta", "k_pages", "y_pages", "block_table", "length", "rows", "cu_seqlens")
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    check(lucid_prefill, (*(prefill[n] for n in names), False, None))
    check(lucid_decode, (*(decode[n] for n in names), False, None))


class Reads(TorchDispatchMode):
    """What brings a number to the host."""

    def __init__(self):
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", (0, 1))
def test_nothing_is_read_back_to_the_host(call, monkeypatch):
    from needlework.ops.lucid import past, step
    from needlework.ops.lucid.solve import by_table, launches

    x = tokens((0, 40), precondition="rowmax")
    given = calls(x, Pages.of(x.k, x.v, torch.tensor([40])), precondition="rowmax", impl="triton")[call]
    launched = []
    for module in (step, by_table, launches):
        monkeypatch.setattr(module, "run", lambda kernel, *_, **__: launched.append(kernel))
    with Reads() as reads:
        solve_pages(**given)
    assert past.read_pages in launched and not reads.found


@pytest.mark.parametrize(
    "name, dtype", covering([spec.name for spec in LUCID_PAGES], (torch.float16, torch.float32), pairs=False)
)
@pytest.mark.parametrize("style", ("random", "clustered"))
def test_the_error_is_within_its_budget(name, dtype, style):
    """Half precision with the blocks of 64 rows that a GPU has: the literal form's."""
    spec = next(spec for spec in LUCID_PAGES if spec.name == name)
    half = dtype == torch.float16
    kept, wide, single = stored(make(spec, 2, 160, style=style), dtype, spec.half)
    form = lambda call, x, **settings: dict(leaves(call(**x, **settings)))
    with forced("lucid/solve", "plain", shared={"C": 64}) if half else contextlib.nullcontext():
        fast = form(spec.chunk, kept, impl="triton")
    definition = form(spec.recurrent, single, operand=operand(dtype))
    literal = form(spec.literal, single, operand=operand(dtype), chunk_size=64 if half else 16)
    assert_within_budget(over_budget(fast, form(spec.recurrent, wide), definition, literal))


@pytest.mark.parametrize("attend", (Lucid(), Softmax(window=7)), ids=lambda attend: attend.kind)
def test_a_layer_with_heads_of_68_is_served_by_padded_tiles(attend, monkeypatch):
    """LUCID's published width, which no tile has: prefill, a few tokens more and decode, solve and read."""
    mixer = build(Attention(heads=2, kv_heads=1, head_dim=68, attend=attend, position=Rope()))
    xs = {slot: sample(n, B=1, seed=slot)[0] for slot, n in ((0, 22), (1, 4))}
    whole = {slot: mixer(x[None])[0][0] for slot, x in xs.items()}
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    found, _ = served(mixer, ({0: 18}, {0: 1, 1: 3}, {0: 2}, {0: 1, 1: 1}), xs)
    assert all(close(found[slot], y) for slot, y in whole.items())
