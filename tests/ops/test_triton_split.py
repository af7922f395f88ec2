"""Sequences in segments, in Triton's interpreter: outputs, final states and every gradient are the definition's."""

import os
from collections import defaultdict
from functools import partial
from itertools import pairwise

import pytest
import torch

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.recurrent import recurrent_delta
from needlework.ops.qdelta.op import recurrent_qdelta
from needlework.ops.runtime import launch_configs
from needlework.testing.compare import EXACT, assert_close, relative
from needlework.testing.errors import operand
from needlework.testing.rows import covering

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

H, HV, K, V = 1, 2, 16, 12
SCALE = 0.25
SCALAR = ("q", "k", "v", "g", "beta", "lam", "q_read")
CHANNEL = ("q", "k", "v", "g", "beta", "erase", "write")
SCALARS = ("additive", "delta", "qdelta", "read")
RULES = {
    "additive": (),
    "delta": ("beta",),
    "qdelta": ("beta", "lam"),
    "read": ("beta", "lam", "q_read"),
    "gla": (),
    "kda": ("beta",),
    "gdn2": ("erase", "write"),
}
PACKED = torch.tensor([0, 21, 21, 66, 71])


def sample(rule, B=1, T=71, style="random", dtype=torch.float64, N=None, K=K, V=V, HV=HV, seed=3):
    generator = torch.Generator().manual_seed(seed)
    gates = () if rule in SCALARS else (K,)
    x = {
        "q": unit(normal(generator, B, T, H, K)),
        "k": keys(generator, B, T, H, K, "identical" if style == "full" else style),
        "v": normal(generator, B, T, HV, V),
        "g": decay(generator, B, T, HV, *gates, style="random" if style == "full" else style),
        "beta": uniform(generator, 0.1, 1.0, B, T, HV),
        "lam": uniform(generator, 0.1, 1.0, B, T, HV),
        "q_read": unit(normal(generator, B, T, H, K)),
        "erase": uniform(generator, 0, 1, B, T, HV, K),
        "write": uniform(generator, 0, 1, B, T, HV, V),
        "initial_state": normal(generator, N or B, HV, K, V),
    }
    if style == "full":
        x |= {"g": torch.zeros_like(x["g"]), "beta": torch.ones_like(x["beta"]), "lam": torch.ones_like(x["lam"])}
    x |= {"do": normal(generator, B, T, HV, V), "dstate": normal(generator, N or B, HV, K, V)}
    wide = torch.promote_types(dtype, torch.float32)
    narrow = ("q", "k", "v", "q_read", "erase", "write", "do")
    chosen = ("q", "k", "v", "g", *RULES[rule], "initial_state", "do", "dstate")
    return {name: x[name].to(dtype if name in narrow else wide) for name in chosen}


def definition(rule, x, cu_seqlens=None, **settings):
    """o, the final state and the gradients of all inputs."""
    call = recurrent_qdelta if "lam" in RULES[rule] else recurrent_delta
    x = dict(x)
    do, dstate = x.pop("do"), x.pop("dstate")
    x = {name: y.detach().requires_grad_() for name, y in x.items()}
    o, state = call(**x, scale=SCALE, output_final_state=True, cu_seqlens=cu_seqlens, **settings)
    gradients = torch.autograd.grad((o, state), list(x.values()), (do.to(o.dtype), dstate.to(state.dtype)))
    return {"o": o.detach(), "state": state.detach(), **{f"d{n}": d for n, d in zip(x, gradients, strict=True)}}


def engine(rule, chosen):
    """forward(aligned inputs, alignment) -> o, state, rest and backward(do, dstate, inputs, rest, alignment) -> gradients."""
    if rule in SCALARS:
        from needlework.ops.delta.scalar import backward as scalar_backward
        from needlework.ops.delta.scalar import op as scalar_op

        settings = {"scale": SCALE, "config": chosen}
        forward, backward = scalar_op.forward, scalar_backward.backward

    else:
        from needlework.ops.delta.channel import backward as channel_backward
        from needlework.ops.delta.channel import op as channel_op

        settings = {"scale": SCALE, "prediction": "decayed", "R": 1, "config": chosen}

        forward, backward = channel_op.forward, channel_backward.backward
    return partial(forward, save=True, **settings), partial(backward, **settings)


def in_segments(rule, x, length, cu_seqlens=None, C=8):
    """What `definition` gives, from the engine's kernels over segments of at most `length` chunks."""
    from needlework.ops.delta import segments

    kind, names = ("delta/scalar", SCALAR) if rule in SCALARS else ("delta/channel", CHANNEL)
    q, v = x["q"], x["v"]
    chosen = launch_configs.launch_config(kind, q.device, q.dtype, q.shape[-1], v.shape[-1])
    chosen = chosen._replace(launch={**chosen.launch, "shared": {"C": C}})
    whole = Alignment.of(cu_seqlens, *q.shape[:2], C, q.device)
    pieces = segments.segmented(whole, C, length)
    given = DeltaInputs(**{name: y for name, y in x.items() if name in names}).aligned(whole)
    forward, backward = engine(rule, chosen)

    def run(values, state):
        # no write gate on columns that are not values
        write = given.write if given.write is None or values is given.v else values
        return forward(given._replace(v=values, write=write, initial_state=state), pieces.align)[1]

    N, M = segments.transitions(run, given.v, q.shape[-1], diagonal=not {"beta", "erase"} & set(x))
    fix_up = partial(segments.fix_up, config=chosen)
    given = given._replace(initial_state=fix_up(M, N, x.get("initial_state"), pieces.first, reverse=False))
    o, state, *saved = forward(given, pieces.align)
    (do,) = whole.align(x["do"])
    reverse = lambda dstate: backward(do, dstate, given, *saved, pieces.align)
    before = reverse(torch.zeros_like(given.initial_state)).initial_state
    gradients = reverse(fix_up(M, before, x["dstate"], pieces.first, reverse=True)).restored(whole)
    found = {"o": whole.restore(o)[0], "state": pieces.ended(state)}
    found |= {f"d{n}": getattr(gradients, n) for n in names if n in x}
    return found | {"dinitial_state": pieces.begun(gradients.initial_state)}


@pytest.mark.parametrize(
    "rule, length",
    [
        *((rule, 3) for rule in RULES),
        *(("qdelta", length) for length in (4, 1)),
        *(pytest.param("kda", length, marks=pytest.mark.slow) for length in (4, 1)),
    ],
)
def test_segments_are_the_sequence_with_every_gradient(rule, length):
    x = sample(rule, T=61)
    assert_close(in_segments(rule, x, length), definition(rule, x), f"{rule}, segments of {length}")


@pytest.mark.parametrize("rule, length", (("qdelta", 3), ("qdelta", 1), ("additive", 2), ("gdn2", 2)))
def test_packed_sequences_are_cut_if_they_are_long(rule, length):
    """Of 3, 0, 6 and 1 chunks."""
    x = sample(rule, N=4, HV=1)
    assert_close(in_segments(rule, x, length, PACKED), definition(rule, x, PACKED), f"{rule}, segments of {length}, packed")


@pytest.mark.parametrize("rule, style", covering(("qdelta", "kda"), ("strong", "full"), pairs=False))
def test_strong_gates_and_identical_keys_change_nothing(rule, style):
    x = sample(rule, B=2, T=29, style=style, HV=1)
    assert_close(in_segments(rule, x, 2), definition(rule, x), f"{rule}, {style}")


@pytest.mark.parametrize("K, V", ((136, 20), (20, 40)))
def test_any_width_and_states_of_two_tiles(K, V):
    x = sample("qdelta", T=40, K=K, V=V, HV=1)
    assert_close(in_segments("qdelta", x, 2), definition("qdelta", x), f"K {K}, V {V}")


def test_without_an_initial_state():
    x = sample("qdelta", T=29, HV=1)
    found = in_segments("qdelta", {name: y for name, y in x.items() if name != "initial_state"}, 2)
    x["initial_state"].zero_()
    assert_close(found, definition("qdelta", x), "no initial state")


@pytest.mark.parametrize(
    "sized, packed",
    covering((("additive", 16), ("delta", 16), ("qdelta", 16), ("read", 24), ("qdelta", 136)), (False, True), pairs=False),
)
def test_one_launch_finds_what_two_walks_find(sized, packed):
    rule, K = sized
    from needlework.ops.delta import segments
    from needlework.ops.delta.scalar import op as scalar_op
    from needlework.ops.delta.scalar.transitions import transitions

    cu_seqlens = PACKED if packed else None
    x = sample(rule, K=K, N=4 if packed else 1)
    chosen = launch_configs.launch_config("delta/scalar", x["q"].device, x["q"].dtype, K, V)
    C = chosen.launch["shared"]["C"]
    whole = Alignment.of(cu_seqlens, 1, 71, C, x["q"].device)
    pieces = segments.segmented(whole, C, 2)
    last = pieces.of[1:] != pieces.of[:-1]
    alone = last & (pieces.align.cum.new_tensor([-1, *pieces.of[:-2]]) != pieces.of[:-1])
    assert (~last).any() and (not packed or alone.any())
    given = DeltaInputs(**{name: y for name, y in x.items() if name in SCALAR}).aligned(whole)
    settings = {"scale": SCALE, "config": chosen, "save": True}
    run = lambda values, state: scalar_op.forward(given._replace(v=values, initial_state=state), pieces.align, **settings)[1]
    expected = segments.transitions(run, given.v, K)
    _, _, saved = scalar_op.forward(given, whole, **settings)
    for save in (True, False):
        N, M = transitions(given, saved, pieces, config=chosen, save=save)
        M = torch.diag_embed(M.expand(*M.shape[:2], K)) if rule == "additive" else M
        of_none = pieces.of[:-1] == whole.N
        for found, other, made in ((N, expected[0], ~last), (M, expected[1], ~alone if save else ~last)):
            assert relative(found[made & ~of_none], other[made & ~of_none]) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule, style", (("qdelta", "full"), ("delta", "clustered")))
def test_half_precision_errs_no_more_than_uncut(rule, style):
    """Four segments against one, every tensor, six seeds together; "full" is identical keys with g = 0, β = λ = 1. The definition's
    own error is the budget's smallest term: what is within twice of it need not be as near as uncut."""
    squares = defaultdict(lambda: [0.0, 0.0, 0.0])
    for seed in range(6):
        x = sample(rule, B=2, T=64, style=style, dtype=torch.float16, V=16, HV=1, seed=seed)
        exact = definition(rule, {name: y.double() for name, y in x.items()})
        single = {name: y.float() for name, y in x.items()}
        ways = (
            in_segments(rule, x, 1, C=16),
            in_segments(rule, x, 4, C=16),
            definition(rule, single, operand=operand(torch.float16)),
        )
        for name in exact:
            for i, way in enumerate(ways):
                squares[name][i] += float((way[name].double() - exact[name]).square().sum())
    for name, (ours, uncut, own) in squares.items():
        assert ours <= max(4 * own, 1.5**2 * uncut), f"{style}: {name} errs {(ours / uncut) ** 0.5:.2f} x as much"


@pytest.mark.parametrize("rule", ("qdelta", "read"))
def test_what_strong_gates_leave_keeps_its_digits(rule):
    """With e^g = 1e-13 at every token nothing else is in dλ and in the initial state's gradient, also where a segment starts."""
    x = sample(rule, T=61, dtype=torch.float16)
    x["g"] = torch.full_like(x["g"], -30.0)
    found, exact = in_segments(rule, x, 3), definition(rule, {name: y.double() for name, y in x.items()})
    for name in ("dlam", "dinitial_state"):
        size = exact[name].norm()
        assert size < 1e-10 and relative(found[name] / size, exact[name] / size) <= 2e-3, name


def test_a_few_chains_are_cut_and_a_full_machine_is_not():
    from needlework.ops.delta.segments import SHORTEST, segment_count

    slots = 264
    assert segment_count(slots, 1024, 128, 128, slots) == 1
    assert segment_count(4 * slots, 1024, 128, 128, slots) == 1
    assert segment_count(1, 2 * SHORTEST - 1, 128, 128, slots) == 1
    assert 4 <= segment_count(32, 1024, 128, 128, slots) <= 16
    for chains in range(1, slots, 7):
        for longest in (1, 31, 64, 1024, 8192):
            counts = [segment_count(chains, longest, columns, 128, slots) for columns in (0, 128, 256)]
            assert counts == sorted(counts, reverse=True), "what costs less to go over is cut into more"
            assert all(count == 1 or longest // count >= SHORTEST for count in counts)


def test_chains_that_would_share_multiprocessors_are_cut_only_where_that_pays():
    """Of 96 chains on 132 multiprocessors three segments each took longer than whole sequences, of 24 they took a third."""
    from needlework.ops.delta.channel.op import sharing
    from needlework.ops.delta.segments import segment_count

    assert segment_count(96, 256, 128, 192, 264) > 1
    assert segment_count(96, 256, 128, 192, 264, sharing(132)) == 1
    assert segment_count(24, 2048, 160, 160, 264, sharing(132)) >= 8


def test_a_call_whose_backward_follows_is_cut_where_one_alone_is_not(monkeypatch):
    """96 chains of a forward on 132 multiprocessors, 64 of its backward's replays."""
    from needlework.ops.delta.channel import op
    from needlework.ops.delta.inputs import DeltaInputs
    from needlework.ops.runtime import launch_configs

    monkeypatch.setattr(op, "multiprocessors", lambda device: 132)
    like = lambda heads, D: torch.empty(4, 4096, heads, D, device="meta")
    inputs = DeltaInputs(like(8, 128), like(8, 128), like(8, 192), like(8, 128), torch.empty(4, 4096, 8, device="meta"))
    row = next(row for row in launch_configs.rows("delta/channel") if row.name == "sm90")
    assert op._segment_length(inputs, 4, None, row, False) == 0
    assert op._segment_length(inputs, 4, None, row, True) > 0


def test_one_of_packed_sequences_may_have_half_of_the_tokens():
    from needlework.ops.delta.segments import segment_count, segment_length

    T, C, alone, half = 16384, 32, segment_count(24, 512, 128, 256, 264), segment_count(24, 256, 128, 256, 264)
    sizes = T, C, 24, 128, 256, 264, False
    assert alone > 1 and segment_length(1, True, *sizes) == segment_length(2, True, *sizes) == -(-512 // alone)
    assert half > 1 and segment_length(3, True, *sizes) == segment_length(9, True, *sizes) == -(-256 // half)
    assert segment_length(2, False, *sizes) == -(-512 // segment_count(48, 512, 128, 256, 264))
    assert segment_length(12, False, *sizes) == 0, "they fill the machine"
    assert segment_length(T // 256, True, *sizes) == 0, "their states take more memory than half the tokens"


def test_documents_that_the_host_has_read_are_cut_where_one_is_long_and_the_machine_has_room():
    from needlework.ops.delta.segments import segment_length

    crowd, one_long = [600, *[256] * 15], [1009, *[1] * 15]
    cut = lambda chunks, chains, T=1 << 17: segment_length(16, True, T, 32, chains, 128, 128, 264, True, chunks=chunks)
    assert cut(crowd, 90) == 0, "together they fill the machine"
    assert cut(crowd, 1) > 0
    assert cut(one_long, 90) > 0
    assert 0 < cut(one_long, 1) < cut(one_long, 60), "fewer segments where there are more chains"
    assert cut(one_long, 1, 20 * 256) == 505, "two segments: more states would take more memory than half the tokens"


@pytest.mark.parametrize("sequences", (4, 130))
@pytest.mark.parametrize("length", (1, 2, 3, 8))
def test_segments_cover_every_chunk_once_and_differ_by_one(sequences, length):
    from needlework.ops.delta.segments import segmented

    ends = PACKED if sequences == 4 else torch.arange(131).square() // 60
    whole = Alignment.of(ends, 1, int(ends[-1]), 8, torch.device("cpu"))
    align, first, of, split = segmented(whole, 8, length)
    lengths, used = align.cum.diff(), int(first[-1])
    assert first[0] == 0 and used <= align.N and lengths.max() <= align.longest <= length
    assert torch.equal(align.cum[first.long()], whole.cum) and not lengths[used:].any()
    for n in range(sequences):
        own = slice(int(first[n]), int(first[n + 1]))
        count, chunks = own.stop - own.start, int(whole.cum[n + 1] - whole.cum[n])
        assert count == max(-(-chunks // length), 1) and lengths[own].max() - lengths[own].min() <= 1
        assert (of[own] == n).all()
        walked = align.spans[own] if count > 1 else align.cum[own, None].expand(-1, 2)
        assert torch.equal(split[own], walked)
    assert (of[used:] == sequences).all()


def test_a_batch_of_sequences_has_no_segment_too_many():
    from needlework.ops.delta.segments import segmented

    pieces = segmented(Alignment.of(None, 3, 71, 8, torch.device("cpu")), 8, 4)
    assert pieces.first.tolist() == [0, 3, 6, 9] and pieces.align.N == 9
    assert pieces.align.cum.tolist() == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]


@pytest.mark.parametrize("sizes, reverse", covering(((16, 12), (100, 20), (256, 20)), (False, True), pairs=False))
def test_the_fix_up_is_the_recurrence_over_segments(sizes, reverse):
    K, V = sizes
    agrees_with_the_recurrence(K, V, (K, K), reverse)


@pytest.mark.parametrize("decays, reverse", covering((1, 100), (False, True), pairs=False))
def test_the_fix_up_of_decays_is_that_of_a_diagonal(decays, reverse):
    agrees_with_the_recurrence(100, 20, (decays,), reverse)


def agrees_with_the_recurrence(K, V, shape, reverse):
    from needlework.ops.delta.segments import fix_up

    generator, ends = torch.Generator().manual_seed(0), [0, 3, 4, 6]
    M, N = normal(generator, 6, HV, *shape) * K**-0.5, normal(generator, 6, HV, K, V)
    full = M if len(shape) == 2 else torch.diag_embed(M.expand(6, HV, K))
    start = normal(generator, 3, HV, K, V)
    expected = torch.empty_like(N)
    for n, (begin, end) in enumerate(pairwise(ends)):
        S = start[n]
        for at in reversed(range(begin, end)) if reverse else range(begin, end):
            expected[at] = S
            S = (full[at].mT if reverse else full[at]) @ S + N[at]
    first = torch.tensor(ends, dtype=torch.int32)
    row = launch_configs.launch_config("delta/scalar", M.device, M.dtype, K, V)
    assert relative(fix_up(M, N, start, first, config=row, reverse=reverse), expected) <= EXACT
    for tma in (False, True):  # tiles of 64 keys, and as many as Hopper has
        single = fix_up(M.float(), N.float(), start.float(), first, config=row._replace(tma=tma), reverse=reverse)
        assert relative(single, expected) <= 1e-6


@pytest.mark.parametrize(
    "call, length", covering((("qdelta", False), ("qdelta", True), ("additive", True), ("read", False)), (1, 2), pairs=False)
)
def test_the_operator_cuts_and_nobody_sees_it(call, length, monkeypatch):
    rule, packed = call
    from needlework.ops.delta.scalar import op as scalar_op

    monkeypatch.setattr(scalar_op, "segment_length", lambda *_, **settings: length)
    cu_seqlens = PACKED if packed else None
    x = sample(rule, N=4 if packed else 1, HV=1)
    leaves = {name: y.detach().requires_grad_() for name, y in x.items() if name not in ("do", "dstate")}
    given = DeltaInputs(**leaves)
    o, state = scalar_op.scalar(given, cu_seqlens, scale=SCALE)
    gradients = torch.autograd.grad((o, state), list(leaves.values()), (x["do"], x["dstate"]))
    found = {"o": o.detach(), "state": state.detach(), **{f"d{n}": d for n, d in zip(leaves, gradients, strict=True)}}
    assert_close(found, definition(rule, x, cu_seqlens), f"{rule}, segments of {length}")
    arguments = (*(None if y is None else y.detach() for y in given), cu_seqlens, SCALE)
    assert relative(scalar_op.delta_scalar(*arguments)[0], o.detach()) == 0
    if length == 2:
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(scalar_op.delta_scalar_fwd, arguments, test_utils=tests)


@pytest.mark.parametrize("rule, packed", (("gla", False), ("kda", False), ("gdn2", False), ("kda", True)))
def test_the_channel_operator_cuts_and_nobody_sees_it(rule, packed, monkeypatch):
    from needlework.ops.delta.channel import op as channel_op

    monkeypatch.setattr(channel_op, "segment_length", lambda *_, **settings: 2)
    cu_seqlens = PACKED if packed else None
    x = sample(rule, N=4 if packed else 1, HV=1)
    leaves = {name: y.detach().requires_grad_() for name, y in x.items() if name not in ("do", "dstate")}
    given = DeltaInputs(**leaves)
    o, state = channel_op.channel(given, cu_seqlens, scale=SCALE, prediction="decayed")
    gradients = torch.autograd.grad((o, state), list(leaves.values()), (x["do"], x["dstate"]))
    found = {"o": o.detach(), "state": state.detach(), **{f"d{n}": d for n, d in zip(leaves, gradients, strict=True)}}
    assert_close(found, definition(rule, x, cu_seqlens), rule)
    arguments = (
        *(None if y is None else y.detach() for y in given),
        cu_seqlens,
        SCALE,
        "decayed",
        1,
    )
    torch.library.opcheck(channel_op.delta_channel_fwd, arguments, test_utils=("test_schema", "test_faketensor"))
