"""Attention over pages in float64: torch against the definition, and against the same attention over dense tensors.

Every sequence lies on pages in shuffled order, in a view of one buffer; all that no query may read is NaN, and a block table's entries
that may not be read name no page.
"""

from functools import partial

import pytest
import torch

from needlework.layers.softmax import softmax_attention
from needlework.ops.lucid import chunk_lucid, solve_pages
from needlework.ops.paged import paged_attention, paged_differential, paged_polar, write_pages
from needlework.ops.paged.reference import differential, literal_attention, recurrent_attention
from needlework.ops.polar import chunk_polar
from needlework.testing.compare import EXACT, relative
from needlework.testing.rows import covering

LENGTHS = (1, 15, 16, 17, 100)
D, V = 16, 24
PARAMETERS = ("alpha", "beta", "gamma", "null_base", "v_null")


def laid_out(k, v, PG=16, window=None, new=None, seed=0):
    """Dense keys and values of each sequence [length Hkv ·] -> pages, block table and lengths. `new`: queries of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(x) for x in k]
    NB = max(-(-length // PG) for length in lengths) + 1
    order = torch.randperm(len(k) * NB + 2, generator=generator).view(-1)
    table = torch.full((len(k), NB), -1, dtype=torch.int32)
    pages = []
    for dense in (k, v):
        # keys and values are views of buffers that hold something else between two pages
        x = torch.full((len(order), 2, PG, *dense[0].shape[1:]), torch.nan, dtype=dense[0].dtype)[:, 1]
        for n, tokens in enumerate(dense):
            oldest = max(0, len(tokens) - (new[n] if new else 1) + 1 - window) if window else 0
            for block in range(oldest // PG, -(-len(tokens) // PG)):
                page = int(order[n * NB + block])
                table[n, block] = page
                rows = tokens[block * PG : (block + 1) * PG]
                x[page, : len(rows)] = rows
        pages.append(x)
    return *pages, {"block_table": table, "length": torch.tensor(lengths, dtype=torch.int32), "window": window}


def sequences(lengths=LENGTHS, Hq=4, Hkv=2, seed=0):
    """q, k, v of each sequence, [length H ·] each."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda H, width: [torch.randn(n, H, width, generator=generator, dtype=torch.float64) for n in lengths]
    return make(Hq, D), make(Hkv, D), make(Hkv, V)


def polar_parameters(Hq=4):
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(4, Hq, generator=generator, dtype=torch.float64)
    return (*numbers, torch.randn(Hq, V, generator=generator, dtype=torch.float64))


def read_outs(Hq=4):
    """name -> the read-out over pages and over one dense sequence [1 T H ·], both as functions of q, k, v."""
    lam = torch.linspace(0.2, 0.9, Hq, dtype=torch.float64)
    parameters = polar_parameters(Hq)
    soft = lambda q, k, v, window: softmax_attention(q, k, v, window=window)[0]
    return {
        "softmax": (paged_attention, soft),
        "differential": (partial(paged_differential, lam=lam), partial(by_layer, lam=lam)),
        "polar": (partial(paged_polar, **dict(zip(PARAMETERS, parameters, strict=True))), polar_of(parameters)),
    }


def polar_of(parameters):
    return lambda q, k, v, window: chunk_polar(q, k, v, *parameters, window=window)[:2]


def by_layer(q, k, v, window, lam):
    """As layers/differential.py attends before its norm."""
    halves = lambda x: torch.cat(x.chunk(2, -1), 2)
    first, second = softmax_attention(halves(q), halves(k), torch.cat((v, v), 2), window=window)[0].chunk(2, 2)
    return first - lam[:, None] * second


def each(x):
    return x if isinstance(x, tuple) else (x,)


def close(got, want):
    return all(relative(a, b) <= EXACT for a, b in zip(each(got), each(want), strict=True))


@pytest.mark.parametrize("impl", ("torch", "reference"))
@pytest.mark.parametrize("name", read_outs())
@pytest.mark.parametrize(
    "PG, Hkv, window", [(16, 2, None), (32, 4, 21), (48, 1, None), (16, 1, 5), (16, 2, 1), (48, 4, 16), (32, 4, 4)]
)
def test_decode_is_the_dense_attentions_last_token(impl, name, PG, Hkv, window):
    attend, dense = read_outs()[name]
    q, k, v = sequences(Hkv=Hkv)
    k_pages, v_pages, where = laid_out(k, v, PG, window)
    got = attend(torch.stack([x[-1] for x in q]), k_pages, v_pages, impl=impl, **where)
    for n, tokens in enumerate(zip(q, k, v, strict=True)):
        want = dense(*(x[None] for x in tokens), window=window)
        assert close(tuple(x[n] for x in each(got)), tuple(x[0, -1] for x in each(want)))


NEW = (1, 0, 16, 3, 41)


def packed(q, new=NEW, spare=0):
    """The newest tokens of each, packed, and cu_seqlens; `spare` rows of NaN at the end."""
    rows = [x[len(x) - n :] for x, n in zip(q, new, strict=True)]
    ends = torch.tensor([0, *torch.tensor(new).cumsum(0)])
    return torch.cat((*rows, torch.full((spare, *q[0].shape[1:]), torch.nan, dtype=q[0].dtype))), ends


@pytest.mark.parametrize("impl", ("torch", "reference"))
@pytest.mark.parametrize("name", read_outs())
@pytest.mark.parametrize("PG, Hkv, window", covering((16, 32, 48), (1, 2, 4), (None, 5, 12, 1000), pairs=False))
def test_prefill_is_the_dense_attentions_newest_tokens(impl, name, PG, Hkv, window):
    attend, dense = read_outs()[name]
    q, k, v = sequences(Hkv=Hkv)
    k_pages, v_pages, where = laid_out(k, v, PG, window, NEW)
    rows, ends = packed(q, spare=3)
    got = attend(rows, k_pages, v_pages, impl=impl, cu_seqlens=ends, **where)
    assert not any(x[-3:].any() for x in each(got))
    for n, tokens in enumerate(zip(q, k, v, strict=True)):
        want = dense(*(x[None] for x in tokens), window=window)
        own = slice(ends[n], ends[n + 1])
        assert close(tuple(x[own] for x in each(got)), tuple(x[0, len(q[n]) - NEW[n] :] for x in each(want)))


@pytest.mark.parametrize("impl", ("torch", "reference"))
@pytest.mark.parametrize("name", read_outs())
def test_padded_rows_are_zeros_and_a_query_without_keys_has_nothing_but_the_null(impl, name):
    attend, _ = read_outs()[name]
    q, k, v = sequences((9, 7, 5))
    k_pages, v_pages, where = laid_out(k, v)
    where["block_table"][1:] = 10**6  # not to be read
    where["length"] = torch.tensor([9, 0, -1])
    last = torch.stack([x[-1] for x in q])
    o, *magnitude = each(attend(last, k_pages, v_pages, impl=impl, **where))
    null = torch.nn.functional.normalize(polar_parameters()[-1], dim=-1)
    assert o[0].all() and not o[2].any() and not any(x[1:].any() for x in magnitude)
    assert relative(o[1], null if name == "polar" else torch.zeros(4, V)) <= EXACT
    ends = torch.tensor([0, 1, 1, 3])  # one query, none on length 0, and two of a padded row
    found = each(attend(last, k_pages, v_pages, impl=impl, cu_seqlens=ends, **where))
    assert relative(found[0][0], o[0]) <= EXACT and not any(x[1:].any() for x in found)


def test_decode_and_prefill_share_a_call():
    """A sequence's one new token beside another's many is what decode says of it."""
    q, k, v = sequences()
    new = (1, 1, 16, 1, 30)
    k_pages, v_pages, where = laid_out(k, v, window=21, new=new)
    rows, ends = packed(q, new)
    together = paged_attention(rows, k_pages, v_pages, cu_seqlens=ends, **where)
    alone = paged_attention(torch.stack([x[-1] for x in q]), k_pages, v_pages, **where)
    assert relative(together[ends[1:] - 1], alone) <= EXACT


def test_a_padded_batch_of_a_captured_graph_is_zeros_past_its_sequences():
    q, k, v = sequences((20, 33))
    k_pages, v_pages, where = laid_out(k, v, new=(2, 3))
    rows, ends = packed(q, (2, 3), spare=4)
    want = paged_attention(rows[:5], k_pages, v_pages, cu_seqlens=ends, **where)
    where["block_table"] = torch.cat((where["block_table"], torch.full((2, where["block_table"].shape[1]), -1).int()))
    where["length"] = torch.cat((where["length"], torch.tensor([-1, -1]).int()))
    got = paged_attention(rows, k_pages, v_pages, cu_seqlens=torch.cat((ends, ends[-1:], ends[-1:])), **where)
    assert relative(got[:5], want) <= EXACT and not got[5:].any()


@pytest.mark.parametrize("window", (None, 21))
def test_lucid_reads_its_solved_values_by_softmax_attention_over_pages(window):
    """Prefill of 30 tokens, then one at a time, against the solve and the attention on dense tensors."""
    q, k, v = (torch.stack(x) for x in sequences((40, 40)))
    dense = softmax_attention(q, k, chunk_lucid(k, v, window=window).y, window=window)[0]
    pages = {"k_pages": k.new_full((6, 16, 2, D), torch.nan), "y_pages": k.new_full((6, 16, 2, V), torch.nan)}
    table = torch.tensor([[4, 1, 3], [0, 5, 2]], dtype=torch.int32)
    for start, end in ((0, 30), *((t, t + 1) for t in range(30, 40))):
        new = end - start
        own = torch.arange(start, end)
        rows = (table[:, own // 16] * 16 + own % 16).long().flatten()
        where = {"block_table": table, "length": torch.tensor([end, end]), "window": window}
        if new > 1:
            where["cu_seqlens"] = torch.tensor([0, new, 2 * new])
        solve_pages(k[:, own].flatten(0, 1), v[:, own].flatten(0, 1), **pages, rows=rows, **where)
        o = paged_attention(q[:, own].flatten(0, 1), *pages.values(), **where)
        assert relative(o, dense[:, own].flatten(0, 1)) <= EXACT


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_rows_are_written_where_they_belong_and_nowhere_else(dtype):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(4, 2, width, generator=generator, dtype=torch.float64) for width in (D, V))
    buffers = [torch.full((3, 2, 16, 2, width), 7.0, dtype=dtype) for width in (D, V)]
    k_pages, v_pages = (x[:, 1] for x in buffers)
    rows = torch.tensor([33, -1, 0, 15])
    write_pages(k, v, k_pages, v_pages, rows)
    for x, pages, buffer in ((k, k_pages, buffers[0]), (v, v_pages, buffers[1])):
        assert torch.equal(pages[2, 1], x[0].to(dtype)) and torch.equal(pages[0, [0, 15]], x[2:].to(dtype))
        assert (buffer != 7).sum() == 3 * x[0].numel()


def test_no_tokens_and_no_sequences_are_no_error():
    q, k, v = sequences((5,))
    k_pages, v_pages, where = laid_out(k, v)
    none = {"block_table": where["block_table"][:0], "length": where["length"][:0]}
    assert paged_attention(q[0][:0], k_pages, v_pages, **none).shape == (0, 4, V)
    assert paged_attention(q[0][:0], k_pages, v_pages, **where, cu_seqlens=torch.tensor([0, 0])).shape == (0, 4, V)
    write_pages(k[0][:0], v[0][:0], k_pages, v_pages, torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("window", (None, 5))
def test_the_two_dense_definitions_are_one(window):
    q, k, v = (torch.stack(x) for x in sequences((37, 37)))
    want = softmax_attention(q, k, v, window=window)[0]
    settings = {"window": window}
    assert relative(recurrent_attention(q, k, v, **settings), want) <= EXACT
    assert relative(literal_attention(q, k, v, chunk_size=16, **settings), want) <= EXACT
    lam = torch.tensor(0.3)
    found = (differential(form, q, k, v, lam, **settings) for form in (recurrent_attention, literal_attention))
    assert all(relative(x, by_layer(q, k, v, window, lam.expand(4))) <= EXACT for x in found)


def given():
    q, k, v = sequences((5, 20))
    k_pages, v_pages, where = laid_out(k, v)
    return {"q": torch.stack([x[-1] for x in q]), "k_pages": k_pages, "v_pages": v_pages, **where}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pages": lambda x: x[..., :8]}, r"k_pages: expected pages that are contiguous"),
        ({"k_pages": lambda x: x[..., :8].contiguous()}, r"k_pages: axis 3 \(d\) .* has size 8, expected 16"),
        ({"v_pages": lambda x: x[:, :8]}, r"v_pages: axis 1 \(PG\) .* has size 8, expected 16"),
        ({n: lambda x: x[:, :8] for n in ("k_pages", "v_pages")}, r"axis 1 \(PG\) has size 8, expected a multiple of 16"),
        ({"q": lambda x: x[:, :3]}, r"q: axis 1 \(Hq\) has size 3, expected a multiple of the 2 key-value heads"),
        ({"q": lambda x: x.float()}, "mixed dtypes: q is torch.float32, k_pages is torch.float64"),
        ({"block_table": lambda x: x[:1]}, r"block_table: axis 0 \(N\) .* has size 1, expected 2"),
        ({"block_table": lambda x: x.long()}, "block_table: expected int32, got torch.int64"),
        ({"length": lambda x: x[:1]}, r"length: axis 0 \(N\) .* has size 1, expected 2"),
        ({"length": lambda x: x.double()}, "length: expected int32 or int64, got torch.float64"),
        ({"cu_seqlens": lambda x: torch.tensor([0, 1, 3])}, r"cu_seqlens: expected to rise from 0 to at most T = 2, got \[0, 1, 3\]"),
        ({"window": lambda x: 0}, "window: expected at least 1"),
        ({"scale": lambda x: -1.0}, "scale: expected a number above 0, got float -1.0"),
        ({"impl": lambda x: "fast"}, "impl: got 'fast'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change, message):
    x = given() | {"cu_seqlens": None, "scale": None, "impl": "torch"}
    with pytest.raises(ValueError, match=message):
        paged_attention(**{n: change.get(n, lambda x: x)(x) for n, x in x.items()})


def test_parameters_that_do_not_fit_are_named():
    x = given()
    with pytest.raises(ValueError, match=r"lam: axis 0 \(Hq\) .* has size 3, expected 4"):
        paged_differential(**x, lam=torch.ones(3))
    with pytest.raises(ValueError, match=r"q: axis 2 \(d\) has size 15, expected an even number"):
        odd = {n: x[n][..., :15].contiguous() for n in ("q", "k_pages")}
        paged_differential(**x | odd, lam=torch.ones(4))
    parameters = dict(zip(PARAMETERS, polar_parameters(), strict=True))
    with pytest.raises(ValueError, match=r"beta: axis 0 \(Hq\) .* has size 2, expected 4"):
        paged_polar(**x, **parameters | {"beta": torch.ones(2)})
    with pytest.raises(ValueError, match=r"v_null: axis 1 \(V\) .* has size 3, expected 24"):
        paged_polar(**x, **parameters | {"v_null": torch.ones(4, 3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": lambda x: x[:, :1]}, r"k: axis 1 \(Hkv\) .* has size 1, expected 2"),
        ({"v": lambda x: x[:1]}, r"v: axis 0 \(T\) .* has size 1, expected 3"),
        ({"rows": lambda x: x[:2]}, r"rows: axis 0 \(T\) .* has size 2, expected 3"),
        ({"rows": lambda x: x.int()}, "rows: expected int64, got torch.int32"),
    ],
)
def test_what_cannot_be_written_is_named(change, message):
    x = {"k": torch.ones(3, 2, D), "v": torch.ones(3, 2, V), "k_pages": torch.ones(4, 16, 2, D)}
    x |= {"v_pages": torch.ones(4, 16, 2, V), "rows": torch.arange(3)}
    with pytest.raises(ValueError, match=message):
        write_pages(**{n: change.get(n, lambda x: x)(x) for n, x in x.items()})
