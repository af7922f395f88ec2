"""LUCID's solve and read as one call, in plain torch: against the definition of both, what is refused and what takes two passes."""

import re

import pytest
import torch

from needlework.ops.lucid import LucidState, paged_lucid, recurrent_lucid
from needlework.ops.lucid.paged import refusal
from needlework.ops.paged.reference import recurrent_attention
from needlework.testing.compare import EXACT, leaves, make, relative
from needlework.testing.lucid_decode import LUCID_DECODE, served
from needlework.testing.lucid_pages import NOWHERE

LENGTHS = (70, 1, 0, 2, 17, 33, -1)
PRECONDITIONS = ("key", "qk", "beta", "rowmax")


def laid_out(lengths=LENGTHS, Hkv=2, G=2, K=16, V=12, PG=16, window=None, solve="window", dtype=torch.float64, seed=0):
    """Arguments of a decode: pages that hold NaN but for the earlier rows that are seen, and no page where none is to be read."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *sizes: torch.randn(*sizes, generator=g, dtype=torch.float64).to(dtype)
    N, NB = len(lengths), -(-max(lengths) // PG) + 1
    owned = torch.randperm(N * NB + 2, generator=g)[: N * NB].view(N, NB)
    apart = lambda width: torch.full((N * NB + 2, 2, PG, Hkv, width), torch.nan, dtype=dtype)[:, 1]
    k_pages, y_pages = apart(K), apart(V)
    table, rows = torch.full((N, NB), NOWHERE, dtype=torch.int32), torch.zeros(N, dtype=torch.int64)
    for n, length in enumerate(lengths):
        first = 0 if window is None or solve == "global" else max(0, length - window)
        for t in range(first, length - 1):
            page = owned[n, t // PG]
            k_pages[page, t % PG], y_pages[page, t % PG] = draw(Hkv, K), draw(Hkv, V)
            table[n, t // PG] = page
        if length > 0:
            page = owned[n, (length - 1) // PG]
            rows[n], table[n, (length - 1) // PG] = page * PG + (length - 1) % PG, page
        else:
            rows[n] = owned[n, 0] * PG  # nothing is written there
    new = {"q": draw(N, Hkv * G, K), "k": draw(N, Hkv, K), "v": draw(N, Hkv, V)}
    where = {"block_table": table, "length": torch.tensor(lengths), "rows": rows, "window": window, "solve": solve}
    return new | {"k_pages": k_pages, "y_pages": y_pages} | where


def with_beta(given, precondition):
    g, (N, Hkv, _) = torch.Generator().manual_seed(9), given["k"].shape
    beta = {"beta": 2 * torch.rand(N, Hkv, generator=g, dtype=torch.float64)} if precondition == "beta" else {}
    return given | beta | {"precondition": precondition}


def copied(given):
    """With pages of its own, as far apart."""
    pages = ("k_pages", "y_pages")
    own = {name: torch.full((len(given[name]), 2, *given[name].shape[1:]), torch.nan).to(given[name])[:, 1] for name in pages}
    for name, x in own.items():
        x.copy_(given[name])
    return given | own


def defined(given):
    """o, the pages after, by the definitions: one sequence after the other."""
    k_pages, y_pages = (given[name].clone() for name in ("k_pages", "y_pages"))
    o, PG = torch.zeros(*given["q"].shape[:2], y_pages.shape[-1], dtype=torch.float64), k_pages.shape[1]
    for n, length in enumerate(given["length"].tolist()):
        if length < 1:
            continue
        W = given["window"] or length
        first = max(0, length - (length if given["solve"] == "global" else W))
        at = [int(given["block_table"][n, t // PG]) * PG + t % PG for t in range(first, length - 1)]
        past_k, past_y = (x.flatten(0, 1)[at][None] for x in (k_pages, y_pages))
        state = LucidState(past_k, past_y, torch.tensor([len(at)]))
        beta = given["beta"][None, n : n + 1] if "beta" in given else None
        new = given["k"][None, n : n + 1], given["v"][None, n : n + 1], beta
        y = recurrent_lucid(*new, precondition=given["precondition"], initial_state=state).y
        k, y = torch.cat((past_k, new[0]), 1), torch.cat((past_y, y), 1)
        o[n] = recurrent_attention(given["q"][None, n : n + 1], k, y, window=given["window"], scale=given.get("scale"))[0, 0]
        row = int(given["rows"][n])
        k_pages[row // PG, row % PG], y_pages[row // PG, row % PG] = k[0, -1], y[0, -1]
    return o, k_pages, y_pages


def agree(given, impl):
    """o and the pages are the definition's; rows that no token has stay as they are, NaN for the most."""
    want, k_pages, y_pages = defined(given)
    own = copied(given)
    got = paged_lucid(**own, impl=impl)
    assert relative(got, want) <= EXACT and not got[given["length"] < 1].any()
    assert torch.equal(own["k_pages"].nan_to_num(nan=9), k_pages.nan_to_num(nan=9))
    assert torch.equal(own["y_pages"].isnan(), y_pages.isnan())
    assert relative(own["y_pages"].nan_to_num(nan=9), y_pages.nan_to_num(nan=9)) <= EXACT


@pytest.mark.parametrize("impl", ("reference", "torch"))
@pytest.mark.parametrize("window, solve", ((None, "window"), (5, "window"), (17, "global")))
@pytest.mark.parametrize("precondition", PRECONDITIONS)
def test_a_token_is_solved_and_attends_as_defined(precondition, window, solve, impl):
    lengths = tuple(length for length in LENGTHS if length)  # these forms refuse a sequence that has not its own token
    agree(with_beta(laid_out(lengths, window=window, solve=solve), precondition) | {"scale": 0.3}, impl)


@pytest.mark.parametrize("spec", LUCID_DECODE, ids=lambda spec: spec.name)
def test_every_token_decodes_to_what_whole_sequences_give(spec):
    ends = torch.tensor([0, 30, 30, 31, 52])
    x = make(spec, 1, 52)
    got, want = (dict(leaves(form(**x, cu_seqlens=ends))) for form in (spec.chunk, spec.recurrent))
    assert all(relative(got[name], want[name]) <= EXACT for name in want)


def test_prefill_and_decode_are_the_same_rows():
    x = make(LUCID_DECODE[0], 2, 21)
    whole, parted = served(**x, precondition="beta"), served(**x, precondition="beta", impl="reference")
    assert all(relative(a, b) <= EXACT for (_, a), (_, b) in zip(leaves(whole), leaves(parted), strict=True))


def test_one_pass_says_what_it_does_not_take():
    new = lambda H: (torch.ones(1, H, 16), torch.ones(1, 2, 16))
    assert refusal(*new(60), None) is None
    assert "several new tokens" in refusal(*new(4), torch.tensor([0, 1]))
    assert "31 query heads a key-value head, at most 30" in refusal(*new(62), None)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(7, 3, 16).double()}, "q: axis 1 (Hq) has size 3, expected a multiple of the 2 key-value heads"),
        ({"q": torch.ones(7, 4, 16)}, "mixed dtypes: q is torch.float32"),
        ({"q": torch.ones(7, 4, 8).double()}, "k_pages: axis 3 (d) of [n PG Hkv d] has size 16, expected 8"),
        ({"q": torch.ones(6, 4, 16).double()}, "block_table: axis 0 (N) of [N NB] has size 7, expected 6"),
        ({"scale": 0.0}, "scale: expected a number above 0"),
        ({"precondition": "beta"}, "beta: expected with precondition='beta' and only then"),
        ({"window": 0}, "window: expected at least 1"),
        ({"rows": torch.zeros(7).int()}, "rows: expected torch.int64"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_lucid(**(laid_out() | change))
