"""LUCID's solve by block table against the definition: prefill in parts, decoding, what is not read and not touched."""

import re

import pytest
import torch

from needlework.ops.common.samples import keys, normal, uniform
from needlework.ops.lucid import chunk_lucid, recurrent_lucid, solve_pages
from needlework.ops.lucid.custom_op import lucid_by_table
from needlework.testing.compare import EXACT, relative
from needlework.testing.lucid_pages import Pages, Tokens, in_calls
from needlework.testing.rows import covering

ENDS = (0, 40, 40, 101, 102, 150)
PRECONDITIONS = ("key", "qk", "beta", "rowmax")
WINDOWS = (None, 1, 5, 17, 48)  # 17: a page of 16, and the row itself


def tokens(ends=ENDS, H=2, K=16, V=12, precondition="key", style="clustered"):
    g = torch.Generator().manual_seed(ends[-1])
    T = ends[-1]
    k = keys(g, 1, T, H, K, style)[0] * uniform(g, 1, 3, T, H, 1)
    return Tokens(k, normal(g, T, H, V), uniform(g, 0, 2, T, H) if precondition == "beta" else None)


def exact(x, ends, **settings):
    return recurrent_lucid(*x.map(lambda t: t[None]), cu_seqlens=torch.tensor(ends), **settings).y[0]


def agree(x, ends, PG=16, impl="torch", **settings):
    """Prefill in two calls and decoding, among NaN and table entries that are no pages, are the definition; the pages hold k and y."""
    where = torch.tensor(ends)
    got = in_calls(x, where, Pages.of(x.k, x.v, where.diff(), PG), impl=impl, **settings)
    assert relative(got.y, exact(x, ends, **settings)) <= EXACT
    assert torch.equal(got.rows_k, x.k) and torch.equal(got.rows_y, got.y)


@pytest.mark.parametrize("impl", ("reference", "torch"))
@pytest.mark.parametrize(
    "precondition, window, solve, PG", covering(PRECONDITIONS, WINDOWS, ("window", "global"), (16, 32, 48), pairs=False)
)
def test_prefill_in_parts_and_decoding_are_the_whole(precondition, window, solve, PG, impl):
    agree(tokens(precondition=precondition), ENDS, PG, impl, precondition=precondition, window=window, solve=solve)


def one(T=40, PG=16, dtype=torch.float64):
    """A sequence of T tokens on pages that have room for it, and the table."""
    x = tokens((0, T)).map(lambda t: t.to(dtype))
    pages = Pages.of(x.k, x.v, torch.tensor([T]), PG)
    return x, pages


def call(x, pages, total, rows, **settings):
    where = {"block_table": pages.table, "length": torch.tensor([total]), "rows": rows}
    return solve_pages(*x, k_pages=pages.k, y_pages=pages.y, **where, **settings)


def tokens_of(pages, start, end):
    return pages.rows(torch.zeros(end - start, dtype=torch.int64), torch.arange(start, end))


@pytest.mark.parametrize("impl", ("reference", "torch"))
def test_within_a_call_rows_are_solved_against_rows_before_rounding_and_across_calls_as_stored(impl):
    x, pages = one(dtype=torch.bfloat16)
    cu_seqlens = lambda count: torch.tensor([0, count])
    first = call(x.map(lambda t: t[:30]), pages, 30, tokens_of(pages, 0, 30), cu_seqlens=cu_seqlens(30), impl=impl)
    whole = chunk_lucid(x.k[None, :30], x.v[None, :30], output_final_state=True)
    assert torch.equal(first, whole.y[0])
    second = call(x.map(lambda t: t[30:]), pages, 40, tokens_of(pages, 30, 40), cu_seqlens=cu_seqlens(10), impl=impl)
    assert torch.equal(second, chunk_lucid(x.k[None, 30:], x.v[None, 30:], initial_state=whole.state).y[0])


@pytest.mark.parametrize("impl", ("reference", "torch"))
def test_a_token_whose_row_is_below_zero_is_solved_and_not_kept(impl):
    x, pages = one()
    want = call(x, pages, 40, tokens_of(pages, 0, 40), cu_seqlens=torch.tensor([0, 40]), impl=impl)
    empty = one()[1]
    got = call(x, empty, 40, torch.full((40,), -1), cu_seqlens=torch.tensor([0, 40]), impl=impl)
    assert torch.equal(got, want) and empty.k.isnan().all() and empty.y.isnan().all()


@pytest.mark.parametrize("count", (1, 7))
def test_the_operator_passes_opcheck_and_compiles(count):
    x, pages = one()
    call(x.map(lambda t: t[:20]), pages, 20, tokens_of(pages, 0, 20), cu_seqlens=torch.tensor([0, 20]))
    new, rows = x.map(lambda t: t[20 : 20 + count]), tokens_of(pages, 20, 20 + count)
    cu_seqlens = None if count == 1 else torch.tensor([0, count])
    dense = pages._replace(k=pages.k.contiguous(), y=pages.y.contiguous())  # opcheck copies what is mutated
    given = *new, dense.k, dense.y, dense.table, torch.tensor([20 + count]), rows, cu_seqlens, False, None
    torch.library.opcheck(lucid_by_table, given, test_utils=("test_schema", "test_faketensor"))
    settings = {"cu_seqlens": cu_seqlens, "impl": "torch"}
    compiled = torch.compile(
        lambda *x: call(Tokens(*x), dense, 20 + count, rows, **settings), fullgraph=True, backend="aot_eager"
    )
    got = compiled(*new)
    assert torch.equal(got, call(new, pages, 20 + count, rows, **settings))
    assert torch.equal(dense.y.flatten(0, 1)[rows], got)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.ones(40, 2).double()}, "k: expected 3 axes [T Hkv K], got shape [40, 2]"),
        ({"k_pages": torch.ones(7, 16, 3, 16).double()}, "k_pages: axis 2 (Hkv) of [n PG Hkv d] has size 3, expected 2"),
        ({"y_pages": torch.ones(7, 16, 2, 16).double()}, "y_pages: axis 3 (V) of [n PG Hkv V] has size 16, expected 12"),
        ({"k_pages": torch.ones(7, 16, 2, 16)}, "mixed dtypes: k is torch.float64, k_pages is torch.float32"),
        ({"PG": 24}, "k_pages: axis 1 (PG) has size 24, expected a multiple of 16"),
        (
            {"k_pages": torch.ones(7, 16, 16, 2).double().transpose(2, 3)},
            "k_pages: expected each page contiguous, got strides (512, 32, 1, 2)",
        ),
        ({"block_table": torch.zeros(1, 3)}, "block_table: expected torch.int32, got torch.float32"),
        ({"block_table": torch.zeros(3).int()}, "block_table: expected 2 axes [N NB], got shape [3]"),
        ({"length": torch.tensor([40, 1])}, "length: axis 0 (N) of [N] has size 2, expected 1"),
        ({"rows": torch.arange(39)}, "rows: axis 0 (T) of [T] has size 39, expected 40"),
        ({"rows": torch.arange(40).int()}, "rows: expected torch.int64, got torch.int32"),
        ({"cu_seqlens": None}, "k: axis 0 (T) has size 40, expected one token for each of 1 sequences; more take cu_seqlens"),
        (
            {"cu_seqlens": torch.tensor([0, 20, 40])},
            "cu_seqlens: axis 0 (N+1) has size 3, expected 2 for 1 rows of block_table",
        ),
        ({"cu_seqlens": torch.tensor([0, 41])}, "cu_seqlens: expected to rise from 0 to at most T = 40, got [0, 41]"),
        ({"length": torch.tensor([39])}, "length: got 39, expected at least the 40 new tokens and at most the 64 rows"),
        ({"length": torch.tensor([65])}, "length: got 65, expected at least the 40 new tokens and at most the 64 rows"),
        ({"rows": torch.arange(40) + 73}, "rows: expected from -1 to below n · PG = 112, got 73 to 112"),
        ({"precondition": "beta"}, "beta: expected with precondition='beta' and only then"),
        ({"window": 0}, "window: expected at least 1"),
        ({"solve": "local"}, "solve: got 'local'"),
        ({"impl": "triton", "K": 300}, "lucid has no Triton kernel for this call"),
    ],
)
@pytest.mark.parametrize("impl", ("reference", "torch"))
def test_bad_arguments_are_refused_by_name(change, message, impl):
    PG, K = change.get("PG", 16), change.get("K", 16)
    x = tokens((0, 40), K=K)
    pages = Pages.of(x.k, x.v, torch.tensor([40]), PG)
    given = {
        "k": x.k,
        "v": x.v,
        "k_pages": pages.k,
        "y_pages": pages.y,
        "block_table": pages.table,
        "length": torch.tensor([40]),
    }
    given |= {"rows": tokens_of(pages, 0, 40), "cu_seqlens": torch.tensor([0, 40]), "impl": impl}
    with pytest.raises(ValueError, match=re.escape(message)):
        solve_pages(**{**given, **{name: x for name, x in change.items() if name not in ("PG", "K")}})
