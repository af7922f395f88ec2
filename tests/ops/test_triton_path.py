"""PaTH's kernels in Triton's interpreter: TRITON_INTERPRET=1 pytest. Blocks of 16 tokens, two a superblock, so that short sequences have
every kind: own blocks, blocks of their superblock, superblocks, and a last one that is not full."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from needlework.ops.common.samples import keys, normal, uniform
from needlework.ops.path import BLOCK, PathState, chunk_path, paged_path, recurrent_path, step_path
from needlework.ops.path.arguments import PathInputs
from needlework.ops.path.reference import literal_path
from needlework.ops.runtime.launch_configs import forced
from needlework.ops.specs import specs
from needlework.testing import checks
from needlework.testing.compare import assert_close, differentiate, leaves, make, poisoned, relative, whole
from needlework.testing.errors import assert_within_budget, operand, over_budget, stored
from needlework.testing.operators import record_custom_ops
from needlework.testing.path_pages import PATH_PAGES, in_calls
from needlework.testing.rows import chosen

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
kernels = partial(chunk_path, impl="triton")


@pytest.fixture(autouse=True)
def small():
    with forced("path/engine", shared={"C": 16, "M": 2}):
        yield


def sample(B, T, *, Hq=2, H=1, K=8, V=6, style="random", seed=0, gates=False):
    g = torch.Generator().manual_seed(seed)
    q, k = (K**0.5 * keys(g, B, T, n, K, style) for n in (Hq, H))
    x = {"q": q, "k": k, "v": normal(g, B, T, H, V), "beta": uniform(g, 0, 2, B, T, H), "w": keys(g, B, T, H, K, style)}
    return x | ({"g": -uniform(g, 0, 1, B, T, Hq).pow(4)} if gates else {})


ROWS = [(T, window, gates) for T in (0, 1, 16, 37, 75) for window in (None, 1, 20, 40) for gates in (False, True)]


@pytest.mark.parametrize(
    "T, window, gates", chosen(ROWS, [(0, None, True), (75, 20, False), (75, 20, True), (75, None, False), (75, None, True)])
)
def test_values_and_gradients_are_those_of_the_definition(T, window, gates):
    x = sample(1, T, gates=gates)
    fast = differentiate(lambda x: kernels(**x, window=window).o, x)
    definition = recurrent_path if T else partial(chunk_path, impl="torch")  # a stack of no tokens has no gradient
    exact = differentiate(lambda x: definition(**x, window=window).o, x)
    for got, want, what in zip(fast, exact, ("values", "gradients"), strict=True):
        assert_close(got, want, what)


@pytest.mark.parametrize("Hq, H, window", [(4, 2, None), (6, 1, 40), (3, 1, None)])
def test_heads_of_a_group_share_the_programs_of_the_way_back(Hq, H, window):
    """Two each, and one where a group's heads are odd."""
    x = sample(2, 75, Hq=Hq, H=H)
    with forced("path/engine", shared={"C": 16, "M": 2}, sweep={"HB": 2, "num_warps": 8}):
        fast = differentiate(lambda x: kernels(**x, window=window).o, x)
    exact = differentiate(lambda x: recurrent_path(**x, window=window).o, x)
    assert_close(fast[1], exact[1], "gradients")


@pytest.mark.parametrize("ends, M, longest", [(None, 4, 13), ([0, 90, 200], 2, 7), ([0, 0, 199, 200], 4, 13)])
def test_superblocks_grow_with_the_sequences(ends, M, longest):
    """Of 13 blocks M is 4; packed sequences of half as many have the config's 2, and one token beside 13 blocks counts as one."""
    from needlework.ops.path.engine.walk import Walk

    x, ends = sample(1, 200), None if ends is None else torch.tensor(ends)
    fast = differentiate(lambda x: kernels(**x, cu_seqlens=ends).o, x)
    exact = differentiate(lambda x: chunk_path(**x, cu_seqlens=ends, impl="torch").o, x)
    for got, want, what in zip(fast, exact, ("values", "gradients"), strict=True):
        assert_close(got, want, what)
    given = PathInputs(*(x[name] for name in ("q", "k", "v", "beta", "w")))
    walk = Walk.of(given, ends, None, 1.0)
    assert (walk.M, walk.align.longest) == (M, longest)


@pytest.mark.parametrize("window", chosen([None, 20], [20]))
def test_packed_sequences_are_separate(window):
    """Values, gradients and final states; one is empty, one ends a block, one has two superblocks, which begin at an odd block, one ends
    one."""
    x, ends = sample(1, 100, gates=True), torch.tensor([0, 16, 16, 68, 100])
    call = lambda form, x: form(**x, window=window, cu_seqlens=ends, output_final_state=True)
    fast = differentiate(partial(call, kernels), x)
    exact = differentiate(partial(call, recurrent_path), x)
    for got, want, what in zip(fast, exact, ("values", "gradients"), strict=True):
        assert_close(got, want, what)


@pytest.mark.parametrize("window", [None, 20])
def test_panels_of_the_backward_are_one(window, monkeypatch):
    """A panel of one block of queries: what keys get is added up in panels. H² is passed before a superblock's products, or behind them."""
    from needlework.ops.path.engine import op

    x = sample(1, 90, gates=True)
    call = lambda: differentiate(lambda x: kernels(**x, window=window).o, x)
    whole_panel = call()
    monkeypatch.setattr(op, "SCRATCH", 1)
    monkeypatch.setattr(op, "MOST", 1)
    with forced("path/engine", shared={"C": 16, "M": 2}, sweep={"LATE": 1}):
        assert_close(call()[1], whole_panel[1], "panels")


@pytest.mark.parametrize("most, panels", [(1 << 33, 3), (1, 6)])
def test_a_panel_has_as_many_programs_as_a_gpu_wants(most, panels, monkeypatch):
    """Four, of two heads and two blocks, where the scratch has room for less; one block where those take too much."""
    from needlework.ops.path.engine import op
    from needlework.ops.path.engine.walk import Walk

    swept, launch = [], Walk.launch
    monkeypatch.setattr(op, "SCRATCH", 1)
    monkeypatch.setattr(op, "MOST", most)
    monkeypatch.setattr(
        Walk, "launch", lambda walk, kernel, *given, **flags: swept.append(kernel) or launch(walk, kernel, *given, **flags)
    )
    with forced("path/engine", shared={"C": 16, "M": 2}, sweep={"NP": 4}):
        differentiate(lambda x: kernels(**x).o, sample(1, 90))
    assert swept.count(op.sweep) == panels


BUDGETS = [(d, s, g) for d in (torch.float32, torch.float16) for s in ("random", "clustered") for g in (False, True)]


@pytest.mark.parametrize(
    "dtype, style, gates",
    chosen(BUDGETS, [(torch.float16, "clustered", False), (torch.float32, "clustered", True)]),
)
def test_half_and_single_precision_are_within_the_budget(dtype, style, gates):
    given = sample(4, 60, H=1, Hq=1, K=16, V=16, style=style, gates=gates)
    if gates:
        given = sample(24, 90, H=1, Hq=2, K=16, V=16, style=style, gates=gates)  # of gates there are few numbers
    assert_within_budget(_over_budget(given, dtype))


def test_identical_keys_do_not_add_up_what_rounding_leaves_of_a_row_of_scores():
    """Every row of a softmax's gradient sums to 0: without that dq is at 1.5 times its budget."""
    given = sample(1, 75, K=16, V=64, style="identical")
    assert_within_budget(_over_budget(given, torch.float16))


@pytest.mark.parametrize("gates", (False, True))
def test_a_key_of_many_queries_is_within_the_budget_in_float32(gates, chained):
    """What a long sequence adds up is a sum of its blocks' sums."""
    assert_within_budget(_over_budget(sample(1, 400, Hq=4, K=16, V=16, gates=gates), torch.float32))


def _over_budget(given, dtype):
    kept, wide, single = stored(given, dtype, ("q", "k", "v", "w"))
    ways = (
        differentiate(lambda x: kernels(**x).o, kept),
        differentiate(lambda x: recurrent_path(**x).o, wide),
        differentiate(lambda x: recurrent_path(**x, operand=operand(dtype)).o, single),
        differentiate(lambda x: literal_path(**x, operand=operand(dtype), chunk_size=16).o, single),
    )
    return over_budget(*({**values, **gradients} for values, gradients in ways))


def test_the_final_state_is_made_in_the_kernels_blocks():
    """Of identical reflections it has three times the error in blocks of 64 that it has in blocks of 16."""
    x = {n: y.float() for n, y in sample(1, 70, style="identical").items()}
    of = lambda form: differentiate(lambda x: form(**x, output_final_state=True).state.k, x)
    for got, want in zip(of(kernels), of(partial(chunk_path, impl="torch", chunk_size=16)), strict=True):
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in got)


def test_every_number_is_written():
    for T in (1, 37):
        with poisoned():
            found = differentiate(lambda x: kernels(**x).o, sample(1, T))
        assert all(torch.isfinite(x).all() for part in found for x in part.values())


@pytest.mark.parametrize(
    "check", [checks.custom_ops_pass_opcheck, pytest.param(checks.compiles_without_a_graph_break, marks=pytest.mark.slow)]
)
def test_the_operators_with_gates_are_some_of_pytorchs(check):
    spec = next(spec for spec in specs() if spec.name == "path/fox")
    check(replace(spec, chunk=partial(spec.chunk, impl="triton")))


def test_a_state_to_go_on_from_is_refused_by_name():
    x = sample(1, 5)
    state = chunk_path(**x, output_final_state=True).state
    with pytest.raises(ValueError, match=r"impl='triton': path has no Triton kernel for this call: it goes on from a state"):
        kernels(**x, initial_state=state)
    with pytest.raises(ValueError, match=r"no launch config for float64, K = 65"):
        kernels(**sample(1, 5, K=65))


# Decoding.


@pytest.mark.parametrize(
    "window, gates", chosen([(None, False), (None, True), (7, True), (70, True)], [(None, False), (None, True), (7, True)])
)
def test_steps_are_those_of_torch_and_end_a_block(window, gates, monkeypatch):
    """From two tokens before a block's end to one behind; a padded row, and a slot that nobody owns."""
    x = sample(1, BLOCK + 2, Hq=2, gates=gates)
    full = whole(chunk_path, window=window)(x)
    start = whole(chunk_path, window=window)({n: y[:, : BLOCK - 2] for n, y in x.items()}).state
    rows, slots = window or BLOCK + 10, torch.tensor([2, -1])
    state = PathState(*(torch.full((3, *y.shape[1:]), torch.nan, dtype=y.dtype) for y in start[:4]), torch.zeros(3).long())
    room = lambda y: torch.cat([y, y.new_zeros(3, rows - y.shape[1], *y.shape[2:])], 1)
    if gates:
        state = state._replace(decay=torch.full((3, *start.decay.shape[1:]), torch.nan, dtype=torch.float64))
    for (_, table), (_, y) in zip(leaves(state), leaves(start), strict=True):
        table[2] = y[0]
    state = state._replace(k=room(state.k), v=room(state.v), decay=room(state.decay) if gates else None)
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    for t in range(BLOCK - 2, BLOCK + 2):
        o = step_path(**{n: y[[0, 0], t] for n, y in x.items()}, state=state, slots=slots, window=window)
        assert relative(o[:1], full.o[:, t]) <= 1e-12 and not o[1].any(), f"token {t}"
    kept = full.state.k.shape[1]
    assert relative(state.k[2:, :kept], full.state.k) <= 1e-12 and torch.equal(state.v[2:, :kept], full.state.v)
    assert torch.equal(state.w[2:, :2], full.state.w[:, :2]) and state.length.tolist() == [0, 0, BLOCK + 2]
    assert state.w[:2].isnan().all()
    assert not gates or torch.equal(state.decay[2:, :kept], full.state.decay)


def test_decoding_reads_and_writes_through_a_block_table(monkeypatch):
    """Two sequences of unlike lengths on pages in a mixed order, one in a shared step with a padded row; shares of the keys."""
    x, PG = sample(1, 60, Hq=2, gates=True), 16
    pages = {"k_pages": torch.full((9, PG, 1, 8), torch.nan).double(), "v_pages": torch.full((9, PG, 1, 6), torch.nan).double()}
    pages |= {
        "w_slots": torch.full((3, BLOCK, 1, 8), torch.nan).double(),
        "beta_slots": torch.full((3, BLOCK, 1), torch.nan).double(),
        "decay_pages": torch.full((9, PG, 2), torch.nan).double(),
    }
    table = torch.tensor([[7, 2, 0, 5], [1, -1, -1, -1], [3, 8, -1, -1]], dtype=torch.int32)
    at = lambda n, t: int(table[n, t // PG]) * PG + t % PG
    starts, slots = (57, -1, 18), torch.tensor([2, -1, 0])
    for n in (0, 2):
        new = {name: y[0, : starts[n]] for name, y in x.items()}
        where = {"block_table": table[n : n + 1], "length": torch.tensor([starts[n]]), "slots": slots[n : n + 1]}
        paged_path(
            **new,
            **pages,
            **where,
            rows=torch.tensor([at(n, t) for t in range(starts[n])]),
            cu_seqlens=torch.tensor([0, starts[n]]),
        )
    full = chunk_path(**x).o[0]
    for i in range(2):
        tokens = [starts[n] + i if n != 1 else 0 for n in range(3)]
        where = {"block_table": table, "length": torch.tensor([starts[0] + i + 1, -1, starts[2] + i + 1]), "slots": slots}
        rows = torch.tensor([at(0, tokens[0]), -1, at(2, tokens[2])])
        o = paged_path(**{name: y[0, tokens] for name, y in x.items()}, **pages, **where, rows=rows, impl="triton")
        assert relative(o[[0, 2]], full[[tokens[0], tokens[2]]]) <= 1e-12 and not o[1].any()


@pytest.mark.parametrize("cu_seqlens", [torch.tensor([0, 2]), None])
def test_the_operators_on_pages_are_some_of_pytorchs(cu_seqlens):
    """Prefill and decoding, with every tensor that they may change."""
    assert_operators(paged_path, 1, sample(1, 2 if cu_seqlens is not None else 1, gates=True), cu_seqlens)


def assert_operators(form, count, x, cu_seqlens):
    """So many operators behind two tokens that are held: torch.library finds nothing wrong with them, and the compiler takes the call."""
    x = {name: y[0] for name, y in x.items()}
    g = torch.Generator().manual_seed(1)
    pages = {"k_pages": normal(g, 2, 16, 1, 8), "v_pages" if form is paged_path else "y_pages": normal(g, 2, 16, 1, 6)}
    pages |= {"w_slots": normal(g, 2, BLOCK, 1, 8), "beta_slots": normal(g, 2, BLOCK, 1)}
    pages |= {"decay_pages": normal(g, 2, 16, 2)} if "g" in x else {"norm_pages": uniform(g, 1, 2, 2, 16, 1)}
    T = len(x["k"])
    where = {"slots": torch.tensor([1]), "block_table": torch.tensor([[1]], dtype=torch.int32), "length": torch.tensor([2 + T])}
    call = lambda pages: form(**x, **pages, **where, rows=torch.arange(18, 18 + T), cu_seqlens=cu_seqlens, impl="triton")
    own, compiled = ({name: y.clone() for name, y in pages.items()} for _ in range(2))
    with record_custom_ops() as calls:
        o = call(own)
    assert len(calls) == count
    for op, args, kwargs in calls.values():
        torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(compiled), o)
    assert all(torch.equal(y, compiled[name]) and not torch.equal(y, pages[name]) for name, y in own.items())


# Prompts on pages. Five superblocks of 32 tokens in one sequence, whose calls begin and end within blocks of 64.

ENDS = torch.tensor([0, 170, 170, 171, 300])


def held(memory, ends, n, window):
    """Of sequence n the rows that a window still shows, and which of its tokens they have."""
    length = int(ends.diff()[n])
    t = torch.arange(0 if window is None else max(0, length - window), length)
    rows = memory.rows(torch.full_like(t, n), t)
    return t, {name: x.flatten(0, 1)[rows] for name, x in memory.pages.items()}


@pytest.mark.parametrize(
    "window, gates, impl",
    [
        (None, False, "triton"),
        (20, True, "triton"),
        (90, True, "triton"),
        (1, True, "triton"),
        (None, True, "triton"),
        (90, True, "torch"),
        (1, True, "torch"),
    ],
)
def test_a_prompt_on_pages_is_the_sequence(window, gates, impl):
    """What it returns, and what pages and slots then hold, some of it decoded."""
    x = {name: y[0] for name, y in sample(1, 300, Hq=2, gates=gates).items()}
    o, memory = in_calls(x, ENDS, window=window, impl=impl)
    exact = chunk_path(**{name: y[None] for name, y in x.items()}, cu_seqlens=ENDS, window=window)
    assert relative(o, exact.o[0]) <= 1e-12
    for n in (0, 2, 3):
        own = {name: y[None, ENDS[n] : ENDS[n + 1]] for name, y in x.items()}
        state, (t, rows), slot = (
            chunk_path(**own, output_final_state=True).state,
            held(memory, ENDS, n, window),
            memory.slots[n],
        )
        assert relative(rows["k_pages"], state.k[0, t]) <= 1e-12 and torch.equal(rows["y_pages"], own["v"][0, t])
        assert not gates or window == 1 or relative(rows["decay_pages"], state.decay[0, t]) <= 1e-12
        opened = slice(int(state.length) % BLOCK)
        assert torch.equal(memory.open_block["w_slots"][slot, opened], state.w[0, opened])
        assert torch.equal(memory.open_block["beta_slots"][slot, opened], state.beta[0, opened])


@pytest.mark.parametrize(
    "name", chosen([spec.name for spec in PATH_PAGES], ("path/pages", "path/lucid-window-read-pages", "path/fox-pages"))
)
def test_half_prompts_on_pages_are_within_the_budget(name):
    spec = next(spec for spec in PATH_PAGES if spec.name == name)
    given = make(spec, 1, 200, style="clustered")
    kept, wide, single = stored(given, torch.float16, spec.half)
    form = lambda call, x, **settings: dict(leaves(call(**x, cu_seqlens=torch.tensor([0, 150, 200]), **settings)))
    ways = [form(spec.chunk, kept, impl="triton"), form(spec.chunk, wide)]
    ways += [
        form(spec.recurrent, single, operand=operand(torch.float16)),
        form(spec.literal, single, operand=operand(torch.float16), chunk_size=16),
    ]
    assert_within_budget(over_budget(*ways))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["path/pages", "path/fox-pages", "path/lucid-read-pages"])
def test_half_tokens_that_decode_are_within_the_budget(name):
    """By themselves: two of each sequence, behind a closed block and in the open one."""
    spec = next(spec for spec in PATH_PAGES if spec.name == name)
    N, T = 24, BLOCK + 9
    given = spec.inputs(torch.Generator().manual_seed(0), 1, N * T, "random", Hq=4)
    kept, wide, single = stored(given, torch.float16, spec.half)
    ends = torch.arange(N + 1) * T
    decoded = lambda call, x, **settings: {"o": call(**x, cu_seqlens=ends, **settings)[0][0].unflatten(0, (N, T))[:, -2:]}
    rounded = {"operand": operand(torch.float16)}
    ways = decoded(spec.chunk, kept, impl="triton"), decoded(spec.chunk, wide)
    ways += decoded(spec.recurrent, single, **rounded), decoded(spec.literal, single, **rounded, chunk_size=16)
    assert_within_budget(over_budget(*ways))
