"""Sequences cut into segments, in Triton's interpreter: outputs, final states and every gradient are the definition's."""

import os
from collections import defaultdict

import pytest
import torch

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.delta.op import recurrent_delta
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
    """forward(aligned tokens, state, alignment) -> o, state, rest and backward(do, dstate, the same, rest) -> gradients."""
    if rule in SCALARS:
        from needlework.ops.delta.scalar import backward as scalar_backward
        from needlework.ops.delta.scalar import op as scalar_op

        def forward(tokens, state, alignment):
            o, final, *saved = scalar_op.forward(*tokens, state, alignment, scale=SCALE, config=chosen, save=True)
            return o, final, saved

        def backward(do, dstate, tokens, state, saved, alignment):
            return scalar_backward.backward(do, dstate, *tokens, state, saved, alignment, scale=SCALE, config=chosen)

    else:
        from needlework.ops.delta.channel import backward as channel_backward
        from needlework.ops.delta.channel import op as channel_op

        settings = {"scale": SCALE, "prediction": "decayed", "R": 1, "config": chosen}

        def forward(tokens, state, alignment):
            return channel_op.forward(*tokens, state, alignment, **settings, save=True)

        def backward(do, dstate, tokens, state, saved, alignment):
            return channel_backward.backward(do, dstate, *tokens, state, saved, alignment, **settings)

    return forward, backward


def cut(rule, x, parts, cu_seqlens=None, C=8):
    """What `definition` gives, from the engine's kernels over segments."""
    from needlework.ops.delta import segments as split

    kind, names = ("delta/scalar", SCALAR) if rule in SCALARS else ("delta/channel", CHANNEL)
    q, v = x["q"], x["v"]
    chosen = launch_configs.launch_config(kind, q.device, q.dtype, q.shape[-1], v.shape[-1])
    chosen = chosen._replace(launch={**chosen.launch, "shared": {"C": C}})
    whole = Alignment.of(cu_seqlens, *q.shape[:2], C, q.device)
    pieces = split.segments(whole, parts)
    tokens = [None if x.get(name) is None else whole.align(x[name]) for name in names]
    forward, backward = engine(rule, chosen)

    def run(values, state):
        # no write gate on columns that are not values
        other = [
            y if y is None or name != "write" or values is tokens[2] else values for name, y in zip(names, tokens, strict=True)
        ]
        return forward([*other[:2], values, *other[3:]], state, pieces)[1]

    N, M = split.transitions(run, tokens[2], q.shape[-1])
    starts = split.fix_up(M, N, x.get("initial_state"), parts, reverse=False)
    o, state, saved = forward(tokens, starts, pieces)
    do = whole.align(x["do"])
    reverse = lambda dstate: backward(do, dstate, tokens, starts, saved, pieces)
    ends = split.fix_up(M, reverse(torch.zeros_like(starts))[-1], x["dstate"], parts, reverse=True)
    *gradients, dinitial = reverse(ends)
    found = {"o": whole.restore(o), "state": state[parts - 1 :: parts]}
    found |= {f"d{n}": whole.restore(d) for n, d in zip(names, gradients, strict=True) if n in x}
    return found | {"dinitial_state": dinitial[::parts]}


@pytest.mark.parametrize(
    "rule, parts",
    [
        *((rule, 3) for rule in RULES),
        *(("qdelta", parts) for parts in (2, 8)),
        *(pytest.param("kda", parts, marks=pytest.mark.slow) for parts in (2, 8)),
    ],
)
def test_segments_are_the_sequence_with_every_gradient(rule, parts):
    x = sample(rule, T=61)
    assert_close(cut(rule, x, parts), definition(rule, x), f"{rule}, {parts} parts")


@pytest.mark.parametrize("rule, parts", (("qdelta", 2), ("qdelta", 8), ("additive", 3), ("gdn2", 3)))
def test_packed_sequences_are_cut_each_also_an_empty_one(rule, parts):
    """Of 3, 0, 6 and 1 chunks: some segments are empty."""
    x = sample(rule, N=4, HV=1)
    assert_close(cut(rule, x, parts, PACKED), definition(rule, x, PACKED), f"{rule}, {parts} parts, packed")


@pytest.mark.parametrize("rule, style", covering(("qdelta", "kda"), ("strong", "full"), pairs=False))
def test_strong_gates_and_identical_keys_change_nothing(rule, style):
    x = sample(rule, B=2, T=29, style=style, HV=1)
    assert_close(cut(rule, x, 3), definition(rule, x), f"{rule}, {style}")


@pytest.mark.parametrize("K, V", ((136, 20), (20, 40)))
def test_any_width_and_states_of_two_tiles(K, V):
    x = sample("qdelta", T=40, K=K, V=V, HV=1)
    assert_close(cut("qdelta", x, 3), definition("qdelta", x), f"K {K}, V {V}")


def test_without_an_initial_state():
    x = sample("qdelta", T=29, HV=1)
    found = cut("qdelta", {name: y for name, y in x.items() if name != "initial_state"}, 3)
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

    parts, cu_seqlens = 3, PACKED if packed else None
    x = sample(rule, K=K, N=4 if packed else 1)
    chosen = launch_configs.launch_config("delta/scalar", x["q"].device, x["q"].dtype, K, V)
    whole = Alignment.of(cu_seqlens, 1, 71, chosen.launch["shared"]["C"], x["q"].device)
    pieces = segments.segments(whole, parts)
    tokens = [None if x.get(name) is None else whole.align(x[name]) for name in SCALAR]
    settings = {"scale": SCALE, "config": chosen, "save": True}
    run = lambda values, state: scalar_op.forward(*tokens[:2], values, *tokens[3:], state, pieces, **settings)[1]
    expected = segments.transitions(run, tokens[2], K)
    _, _, _, Tp, _, _, G, E, mark, *_ = scalar_op.forward(*tokens, None, whole, **settings)
    q, k, v, _, beta, lam, _ = tokens
    for save in (True, False):
        N, M = transitions(q, k, v, beta, lam, Tp, G, E, pieces, parts, mark, config=chosen, save=save)
        for found, other, made in ((N, expected[0], parts - 1), (M, expected[1], parts - 1 + save)):
            found, other = (y.unflatten(0, (-1, parts))[:, :made] for y in (found, other))
            assert relative(found, other) <= EXACT


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
        ways = cut(rule, x, 4, C=16), cut(rule, x, 1, C=16), definition(rule, single, operand=operand(torch.float16))
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
    found, exact = cut(rule, x, 3), definition(rule, {name: y.double() for name, y in x.items()})
    for name in ("dlam", "dinitial_state"):
        size = exact[name].norm()
        assert size < 1e-10 and relative(found[name] / size, exact[name] / size) <= 2e-3, name


def test_a_few_chains_are_cut_and_a_full_machine_is_not():
    from needlework.ops.delta.segments import SHORTEST, parts_of

    slots = 264
    assert parts_of(slots, 1024, 128, 128, slots) == 1
    assert parts_of(4 * slots, 1024, 128, 128, slots) == 1
    assert parts_of(1, 2 * SHORTEST - 1, 128, 128, slots) == 1
    assert 4 <= parts_of(32, 1024, 128, 128, slots) <= 16
    for chains in range(1, slots, 7):
        for longest in (1, 31, 64, 1024, 8192):
            parts = parts_of(chains, longest, 128, 128, slots)
            assert parts == 1 or longest // parts >= SHORTEST


def test_segments_cover_every_chunk_once_and_differ_by_one():
    from needlework.ops.delta.segments import segments

    for parts in (1, 2, 3, 8):
        whole = Alignment.of(PACKED, 1, 71, 8, torch.device("cpu"))
        pieces = segments(whole, parts)
        assert pieces.N == 4 * parts and torch.equal(pieces.cum[::parts], whole.cum)
        lengths = pieces.cum.diff().view(4, parts)
        assert (lengths.amax(1) - lengths.amin(1) <= 1).all() and lengths.max() <= pieces.longest


@pytest.mark.parametrize("sizes, reverse", covering(((16, 12), (256, 20)), (False, True), pairs=False))
def test_the_fix_up_is_the_recurrence_over_segments(sizes, reverse):
    K, V = sizes
    from needlework.ops.delta.segments import fix_up

    generator, parts = torch.Generator().manual_seed(0), 3
    M, N = normal(generator, 2 * parts, HV, K, K) * K**-0.5, normal(generator, 2 * parts, HV, K, V)
    first = normal(generator, 2, HV, K, V)
    expected = torch.empty_like(N)
    for n in range(2):
        S = first[n]
        for i in range(parts):
            at = n * parts + (parts - 1 - i if reverse else i)
            expected[at] = S
            S = (M[at].mT if reverse else M[at]) @ S + N[at]
    assert relative(fix_up(M, N, first, parts, reverse=reverse), expected) <= EXACT
    single = fix_up(M.float(), N.float(), first.float(), parts, reverse=reverse)
    assert relative(single, expected) <= 1e-6


@pytest.mark.parametrize(
    "call, parts", covering((("qdelta", False), ("qdelta", True), ("additive", True), ("read", False)), (2, 3), pairs=False)
)
def test_the_operator_cuts_and_nobody_sees_it(call, parts, monkeypatch):
    rule, packed = call
    from needlework.ops.delta import segments
    from needlework.ops.delta.scalar.op import delta_scalar, delta_scalar_fwd, scalar

    monkeypatch.setattr(segments, "parts_of", lambda *_: parts)
    cu_seqlens = PACKED if packed else None
    x = sample(rule, N=4 if packed else 1, HV=1)
    leaves = {name: y.detach().requires_grad_() for name, y in x.items() if name not in ("do", "dstate")}
    given = [leaves.get(name) for name in (*SCALAR, "initial_state")]
    o, state = scalar(*given, cu_seqlens, scale=SCALE)
    gradients = torch.autograd.grad((o, state), list(leaves.values()), (x["do"], x["dstate"]))
    found = {"o": o.detach(), "state": state.detach(), **{f"d{n}": d for n, d in zip(leaves, gradients, strict=True)}}
    assert_close(found, definition(rule, x, cu_seqlens), f"{rule}, {parts} parts")
    arguments = (*(None if y is None else y.detach() for y in given), cu_seqlens, SCALE)
    assert relative(delta_scalar(*arguments)[0], o.detach()) == 0
    if parts == 2:
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(delta_scalar_fwd, arguments, test_utils=tests)


@pytest.mark.parametrize("rule, packed", (("gla", False), ("kda", False), ("gdn2", False), ("kda", True)))
def test_the_channel_operator_cuts_and_nobody_sees_it(rule, packed, monkeypatch):
    from needlework.ops.delta.channel import op as channel_op

    monkeypatch.setattr(channel_op, "parts_of", lambda *_: 2)
    cu_seqlens = PACKED if packed else None
    x = sample(rule, N=4 if packed else 1, HV=1)
    leaves = {name: y.detach().requires_grad_() for name, y in x.items() if name not in ("do", "dstate")}
    given = [leaves.get(name) for name in (*CHANNEL, "initial_state")]
    o, state = channel_op.channel(*given, cu_seqlens, scale=SCALE, prediction="decayed")
    gradients = torch.autograd.grad((o, state), list(leaves.values()), (x["do"], x["dstate"]))
    found = {"o": o.detach(), "state": state.detach(), **{f"d{n}": d for n, d in zip(leaves, gradients, strict=True)}}
    assert_close(found, definition(rule, x, cu_seqlens), rule)
    arguments = (*(None if y is None else y.detach() for y in given), cu_seqlens, SCALE, "decayed", 1, True)
    torch.library.opcheck(channel_op.delta_channel_fwd, arguments, test_utils=("test_schema", "test_faketensor"))
