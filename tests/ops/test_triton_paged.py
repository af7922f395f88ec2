"""The kernels of attention over pages in Triton's interpreter, against torch's form, which tests/ops/test_paged.py holds against the
definition. Pages, tables and lengths are those of that file: NaN and no page wherever nothing may be read."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from needlework.ops.paged import paged_attention, write_pages
from needlework.ops.paged.arguments import Pages
from needlework.ops.paged.spec import SPECS
from needlework.ops.runtime.launch_configs import forced, rows
from needlework.testing import checks
from needlework.testing.compare import EXACT, poisoned, relative
from needlework.testing.operators import record_custom_ops
from needlework.testing.rows import chosen, covering
from tests.ops.test_paged import D, V, close, each, laid_out, packed, read_outs, sequences

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
LENGTHS, NEW = (1, 15, 16, 17, 40), (1, 0, 16, 3, 21)
READ_OUTS = tuple(read_outs())
# page, key-value heads of four query heads, window, programs, tile of keys: one split and many, pages of whole tiles and tiles of pages
FORMS = (
    (16, 2, None, 1, 32),
    (32, 4, 21, 64, 16),
    (48, 1, None, 64, 32),
    (16, 2, 5, 64, 16),
    (16, 1, 1, 1, 16),
    (32, 4, None, 400, 16),
)


def launched(programs, BN, **prefill):
    return forced("paged/paged", shared={"programs": programs}, decode={"BN": BN}, prefill={"BN": BN, "LEAST": 1, **prefill})


@pytest.mark.parametrize("name", READ_OUTS)
@pytest.mark.parametrize("PG, Hkv, window, programs, BN", chosen(FORMS, FORMS[:4]))
def test_decode_is_torchs(name, PG, Hkv, window, programs, BN):
    attend, _ = read_outs()[name]
    q, k, v = sequences(LENGTHS, Hkv=Hkv)
    k_pages, v_pages, where = laid_out(k, v, PG, window)
    last = torch.stack([x[-1] for x in q])
    with launched(programs, BN):
        got = attend(last, k_pages, v_pages, impl="triton", **where)
    assert close(got, attend(last, k_pages, v_pages, impl="torch", **where))


@pytest.mark.parametrize("name", READ_OUTS)
def test_three_query_heads_of_a_key_value_head_are_torchs(name):
    """No power of two: a program's tile of several tokens has rows of no query."""
    attend, _ = read_outs(Hq=6)[name]
    q, k, v = sequences(LENGTHS, Hq=6)
    rows, ends = packed(q, NEW)
    for new, given in ((None, {}), (NEW, {"cu_seqlens": ends})):
        k_pages, v_pages, where = laid_out(k, v, new=new)
        call = partial(attend, rows if new else torch.stack([x[-1] for x in q]), k_pages, v_pages, **where, **given)
        with launched(1, 32):
            got = call(impl="triton")
        assert close(got, call(impl="torch"))


@pytest.mark.parametrize("window", (None, 20))
def test_decode_finds_pages_past_those_whose_numbers_are_held_at_a_time(window):
    """Of 34 pages the last two are another load's; the window begins among them."""
    q, k, v = sequences((543, 16), Hq=1, Hkv=1)
    k_pages, v_pages, where = laid_out(k, v, 16, window)
    last = torch.stack([x[-1] for x in q])
    with launched(1, 16):
        got = paged_attention(last, k_pages, v_pages, impl="triton", **where)
    assert relative(got, paged_attention(last, k_pages, v_pages, impl="torch", **where)) <= EXACT


@pytest.mark.parametrize("name", READ_OUTS)
@pytest.mark.parametrize("PG, Hkv, window, programs, BN", chosen(FORMS, FORMS[:4]))
def test_prefill_is_torchs(name, PG, Hkv, window, programs, BN):
    attend, _ = read_outs()[name]
    q, k, v = sequences(LENGTHS, Hkv=Hkv)
    k_pages, v_pages, where = laid_out(k, v, PG, window, NEW)
    asks, ends = packed(q, NEW, spare=3)
    with launched(programs, BN, BM=32):
        got = attend(asks, k_pages, v_pages, impl="triton", cu_seqlens=ends, **where)
    assert not any(x[-3:].any() for x in each(got))
    assert close(got, attend(asks, k_pages, v_pages, impl="torch", cu_seqlens=ends, **where))


@pytest.mark.parametrize("name", READ_OUTS)
@pytest.mark.parametrize("programs", (1, 64))
def test_a_few_new_tokens_a_sequence_and_groups_that_are_no_power_of_two(name, programs):
    """Tiles of a decode's height: three query heads a group, up to two tokens a sequence, some of none, and a padded batch. Every output
    is written: torch.empty gives NaN."""
    attend, _ = read_outs(6)[name]
    q, k, v = sequences((3, 33, 20, 9), Hq=6)
    new = (2, 1, 0, 2)
    k_pages, v_pages, where = laid_out(k, v, window=17, new=new)
    where["block_table"] = torch.cat((where["block_table"], torch.full_like(where["block_table"][:2], -1)))
    where["length"] = torch.cat((where["length"], torch.tensor([-1, -1]).int()))
    asks, ends = packed(q, new, spare=3)
    ends = torch.cat((ends, ends[-1:], ends[-1:]))
    with launched(programs, 16), poisoned():
        got = attend(asks, k_pages, v_pages, impl="triton", cu_seqlens=ends, **where)
    assert close(got, attend(asks, k_pages, v_pages, impl="torch", cu_seqlens=ends, **where))


@pytest.mark.parametrize("name", READ_OUTS)
@pytest.mark.parametrize("programs", (1, 64))
def test_padded_rows_are_zeros_and_a_query_without_keys_has_nothing_but_the_null(name, programs):
    attend, _ = read_outs()[name]
    q, k, v = sequences((9, 7, 5))
    k_pages, v_pages, where = laid_out(k, v)
    where["block_table"][1:] = 10**6  # not to be read
    where["length"] = torch.tensor([9, 0, -1])
    last = torch.stack([x[-1] for x in q])
    for packing in ({}, {"cu_seqlens": torch.tensor([0, 1, 2, 3])}):
        with launched(programs, 16), poisoned():
            got = attend(last, k_pages, v_pages, impl="triton", **where, **packing)
        assert close(got, attend(last, k_pages, v_pages, impl="torch", **where, **packing))
        assert not any(x[2].any() for x in each(got))


def test_every_launch_config_is_for_some_width_and_says_why():
    for row in rows("paged/paged"):
        assert row.why and row.K[0] <= row.K[1]


def test_the_tile_of_a_token_is_found_among_many_sequences():
    """More sequences than are counted at a time, most of them of no new token."""
    lengths = [1 + n % 3 for n in range(140)]
    new = [int(n % 5 == 0) * lengths[n] for n in range(140)]
    q, k, v = sequences(lengths, Hq=1, Hkv=1)
    k_pages, v_pages, where = laid_out(k, v, new=new)
    asks, ends = packed(q, new)
    with launched(1, 16):
        got = paged_attention(asks, k_pages, v_pages, impl="triton", cu_seqlens=ends, **where)
    assert relative(got, paged_attention(asks, k_pages, v_pages, impl="torch", cu_seqlens=ends, **where)) <= EXACT


@pytest.mark.parametrize(
    "given, form", covering((("decay",), ("slopes", "decay"), ("slopes",)), (FORMS[1], FORMS[3], FORMS[0]), pairs=False)
)
def test_what_is_added_to_the_scores_is_torchs_in_decode_and_prefill(given, form):
    PG, Hkv, window, programs, BN = form
    q, k, v = sequences(LENGTHS, Hkv=Hkv)
    k_pages, v_pages, where = laid_out(k, v, PG, window, NEW)
    generator = torch.Generator().manual_seed(3)
    decays = [-torch.rand(n, 4, generator=generator, dtype=torch.float64).cumsum(0) - 1e3 for n in LENGTHS]
    held = laid_out([x[:, None] for x in decays], v, PG, window, NEW)[0].squeeze(2)
    slopes = {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)} if "slopes" in given else {}
    last = {"decay": torch.stack([x[-1] for x in decays]), "decay_pages": held} if "decay" in given else {}
    asks, ends = packed(q, NEW, spare=3)
    new = last | ({"decay": packed(decays, NEW, spare=3)[0]} if "decay" in given else {})
    calls = (torch.stack([x[-1] for x in q]), last, {}), (asks, new, {"cu_seqlens": ends})
    with launched(programs, BN, BM=32):
        for rows, added, packing in calls:
            call = lambda impl, rows=rows, added=added, packing=packing: paged_attention(
                rows, k_pages, v_pages, impl=impl, **slopes, **added, **packing, **where
            )
            assert close(call("triton"), call("torch"))


def test_rows_are_written_as_torch_writes_them():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(4, 2, 3 * width, generator=generator)[..., width : 2 * width] for width in (D, V))
    k = k.transpose(0, 1).contiguous().transpose(0, 1)  # heads apart
    pages = {impl: [torch.full((3, 2, 48, 2, width), 7.0).half()[:, 1] for width in (D, V)] for impl in ("triton", "torch")}
    decay = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    for impl, (k_pages, v_pages) in pages.items():
        held = torch.full((3, 2, 48, 5), 7.0, dtype=torch.float64)[:, 1]
        pages[impl].append(held)
        write_pages(k, v, k_pages, v_pages, torch.tensor([143, -1, 0, 47]), decay=decay, decay_pages=held, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(*pages.values(), strict=True))


@pytest.mark.parametrize(
    "spec", chosen(SPECS, [spec for spec in SPECS if spec.name != "paged/forgetting"]), ids=lambda spec: spec.name
)
def test_float32_is_within_its_budget(spec):
    """Of random inputs; a head's null is one number, whose rounding takes the many draws that `needlework doctor` makes."""
    spec = replace(spec, chunk=partial(spec.chunk, impl="triton"), styles=spec.styles[:1])
    checks.error_budget(spec, dtypes=(torch.float32,), B=2, T=35)


@pytest.mark.parametrize("lam, tokens", ((None, 8), (torch.empty(4, device="meta"), 4)), ids=("softmax", "differential"))
def test_nothing_is_read_back_and_grids_follow_from_shapes(lam, tokens, monkeypatch):
    """Meta tensors have no values to read."""
    from needlework.ops.paged.engine import op

    grids = []
    monkeypatch.setattr(op, "run", lambda kernel, grid, *_, **constants: grids.append((kernel.__name__, *grid)))
    empty = lambda *sizes, dtype=torch.float64: torch.empty(*sizes, dtype=dtype, device="meta")
    pages = Pages(
        empty(40, 16, 2, D), empty(40, 16, 2, V), empty(3, 5, dtype=torch.int32), empty(3, dtype=torch.int32), None, None
    )
    read = op.SOFTMAX if lam is None else op.DIFFERENTIAL
    with launched(24, 16):
        op._launch(empty(3, 4, D), pages, read, lam=lam)
        op._launch(empty(90, 4, D), pages._replace(cu_seqlens=empty(4, dtype=torch.int64)), read, lam=lam)
        op._launch(empty(3, 4, D), pages._replace(window=1), read, lam=lam)
    splits = 24 // (3 * 2)
    packed_tiles = 90 // tokens + 3 + 1
    assert grids[:3] == [("attend", 3 * 2 * splits), ("merge", 3 * 4), ("attend", packed_tiles * 2)]
    assert grids[3] == ("attend", 3 * 2 * 2), "a window of one token lies in two tiles of keys at most"


@pytest.mark.parametrize("name", READ_OUTS)
def test_operators_are_registered_and_compile(name):
    q, k, v = sequences((3, 20), Hkv=2)
    k_pages, v_pages, where = laid_out(k, v, new=(1, 2))
    asks, ends = packed(q, (1, 2))
    attend, _ = read_outs()[name]
    with record_custom_ops() as calls:
        attend(asks, k_pages, v_pages, impl="triton", cu_seqlens=ends, **where)
        write_pages(k[0], v[0], k_pages, v_pages, torch.arange(3), impl="triton")
    assert len(calls) == 2
    for op, args, kwargs in calls.values():
        torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    call = lambda asks: attend(asks, k_pages, v_pages, impl="triton", cu_seqlens=ends, **where)
    assert close(torch.compile(call, fullgraph=True, backend="aot_eager")(asks), call(asks))
