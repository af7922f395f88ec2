"""The scalar-gate engine: DeltaNet, Gated DeltaNet, Q-Delta and their additive kin, as two operators of Triton kernels.

    S_t = e^{g_t} S_{t-1} + β_t k_t (v_t − (e^{g_t} S_{t-1})ᵀ x_t)ᵀ,   x = k + λq        o_t = scale · S_tᵀ r_t

beta None: nothing is erased, S_t = e^{g_t} S_{t-1} + k_t v_tᵀ. lam None: x = k. r = q_read, or q where there is none.
`intra.py` makes what each chunk needs, `scan.py` walks the chunks; their constants are in scalar.launch.json.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from needlework.ops.common.alignment import Alignment
from needlework.ops.common.kernels.tile import token_tile
from needlework.ops.common.packing import check_cu_seqlens
from needlework.ops.delta.scalar.intra import ROWS, intra
from needlework.ops.delta.scalar.scan import scan
from needlework.ops.runtime.custom_op import backward_operator, differentiable, operator
from needlework.ops.runtime.launch_configs import Case, LaunchConfig, launch_config
from needlework.ops.runtime.precompile import kind, meta, precompile, run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, padded

ENGINE = "delta/scalar"
SAVED = 12  # tensors that the forward keeps for the backward
WIDE = TYPES[torch.bfloat16]  # operands of a second form: float32's range


def scalar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    lam: Tensor | None,
    q_read: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [B T HV V] in q's dtype, final state [N HV K V] in float32 or wider; differentiable in every tensor."""
    if lam is None and q_read is not None:
        q, q_read = q_read, None
    given = (q, k, v, g, beta, lam, q_read, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return delta_scalar_fwd(*given, cu_seqlens, scale)[:2]
    return delta_scalar(*given, cu_seqlens, scale)


@operator
def delta_scalar(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, lam: Tensor | None, q_read: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and the final state. An operator of its own: results that are not there cost the host as much as a launch."""
    o, state, *_ = _call(q, k, v, g, beta, lam, q_read, initial_state, cu_seqlens, scale, save=False)
    return o, state


@operator
def delta_scalar_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, lam: Tensor | None, q_read: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """o, final state, and what the backward wants, over aligned tokens: W, T, P', A, G, E, the mark of a second form, the copies of q, k and
    q_read as operands, and of sequences cut into segments their starts and M (empty where there is none)."""
    return _call(q, k, v, g, beta, lam, q_read, initial_state, cu_seqlens, scale, save=True)


def _call(q, k, v, g, beta, lam, q_read, initial_state, cu_seqlens, scale: float, *, save: bool) -> tuple[Tensor, ...]:
    """`forward` of tokens that lie as the caller has them."""
    chosen = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    align = _alignment(q, cu_seqlens, chosen)
    tokens = [None if x is None else align.align(x) for x in (q, k, v, g, beta, lam, q_read)]
    parts = _parts(align.N, v.shape, k.shape[-1], cu_seqlens, chosen)
    settings = {"scale": scale, "config": chosen}
    key = ENGINE, chosen.name, kind(*tokens, initial_state), parts > 1, save
    precompile(q.device, key, lambda: _launches(meta(*tokens, initial_state), align, save, parts, settings))
    o, *others = forward(*tokens, initial_state, align, save=save, parts=parts, **settings)
    return align.restore(o).contiguous(), *others


@backward_operator
def delta_scalar_bwd(
    do: Tensor, dstate: Tensor | None, saved: list[Tensor],
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, lam: Tensor | None, q_read: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta, lam, q_read and the initial state; an empty tensor for what was not given."""
    from needlework.ops.delta.scalar.backward import backward

    chosen = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], v.shape[-1])
    chunk = saved[2].shape[-1]
    if chunk != chosen.launch["shared"]["C"]:
        raise RuntimeError(f"{ENGINE}: the forward ran with chunks of {chunk}, the config for the backward has others")
    given = (q, k, v, g, beta, lam, q_read)
    if q.shape[1] == 0:
        dtokens = [None if x is None else torch.zeros_like(x) for x in given]
        dinitial = None
        if initial_state is not None:
            dinitial = torch.zeros_like(initial_state) if dstate is None else dstate.to(initial_state.dtype, copy=True)
    else:
        align = _alignment(q, cu_seqlens, chosen)
        do, *tokens = (None if x is None else align.align(x) for x in (do, *given))
        dstate = None if dstate is None else dstate.contiguous()
        *dtokens, dinitial = backward(do, dstate, *tokens, initial_state, saved, align, scale=scale, config=chosen)
        dtokens = [None if x is None else align.restore(x) for x in dtokens]
    return [
        q.new_empty(0) if x is None else dx.to(x.dtype).contiguous()
        for x, dx in zip((*given, initial_state), (*dtokens, dinitial), strict=True)
    ]


def _launches(inputs: list[Tensor | None], align: Alignment, save: bool, parts: int, settings: dict) -> None:
    """What a call and its backward launch."""
    from needlework.ops.delta.scalar.backward import backward

    o, _, *saved = forward(*inputs, align, save=save, parts=parts, **settings)
    if save:
        backward(torch.empty_like(o), None, *inputs, tuple(saved), align, **settings)


def forward(
    q,
    k,
    v,
    g,
    beta,
    lam,
    q_read,
    initial_state,
    align: Alignment,
    *,
    scale: float,
    config: LaunchConfig,
    save: bool,
    parts: int = 1,
):
    """o and state of aligned tokens; with `save` also W, T, P', A, G, E, the mark, the copies, the segments' starts and M."""
    B, T, HV, V = v.shape
    K, C = k.shape[3], config.launch["shared"]["C"]
    rows = -(-T // C) * C
    wide = accumulator(q.dtype)
    operand = solve(q.dtype)
    o, W = torch.empty_like(v), torch.empty_like(v, dtype=operand) if save else None
    pairs = lambda kind, wanted=True, columns=C: q.new_empty(B if wanted else 0, HV, rows, columns, dtype=kind)
    Pp, Tp = pairs(operand), pairs(inverse(q.dtype), beta is not None)
    A = pairs(operand, beta is not None, saved_columns(C, lam, q_read)) if save else None
    # q is not copied where it neither reads nor enters x
    wanted = (q if q_read is None or lam is not None else None), k, q_read
    copies = [None if x is None or x.dtype == operand else torch.empty_like(x, dtype=operand) for x in wanted]
    G, E = q.new_empty(B, HV, rows, dtype=wide), q.new_empty(B, HV, rows // C, ROWS.value, C, dtype=wide)
    q_, k_, read = (x if copy is None else copy for x, copy in zip((q, k, q_read), copies, strict=True))
    if o.numel():
        launch_intra(q, k, v, g, beta, lam, q_read, Tp, Pp, A, G, E, copies, scale=scale, config=config)
    both = forms(q.dtype, lam is not None)
    mark = unmarked(both, q.device)
    if parts > 1:
        from needlework.ops.delta.scalar.transitions import transitions
        from needlework.ops.delta.segments import fix_up, segments

        align, first = segments(align, parts), initial_state
        tokens = q_, k_, v, beta, lam, Tp, G, E, align, parts, mark
        N, M = transitions(*tokens, config=config, save=save)
        initial_state = starts = fix_up(M, N, first, parts, reverse=False)
    # no chunk: the kernels do not touch the state
    untouched = align.place is not None or T == 0
    if initial_state is not None:
        initial_state = initial_state.contiguous()
        state = initial_state.to(wide, copy=True) if untouched else torch.empty_like(initial_state, dtype=wide)
    else:
        state = (torch.zeros if untouched else torch.empty)(align.N, HV, K, V, dtype=wide, device=q.device)
    if o.numel():
        walk = walk_of(
            q_, k_, v, g, beta, lam, read, Tp, Pp, G, E, o, W, initial_state, state, align, mark, scale=scale, config=config
        )
        for form in both:
            if parts > 1 and form == 2:
                transitions(*tokens, (N, M), config=config, save=save)
                fix_up(M, N, first, parts, reverse=False, into=starts, when=mark)
            walk(form)
    state = state if parts == 1 else state[parts - 1 :: parts].clone()
    if not save:
        return o, state
    copies = [q.new_empty(0, dtype=operand) if x is None else x for x in copies]
    cut = (starts, M) if parts > 1 else (q.new_empty(0, HV, K, D, dtype=wide) for D in (V, K))
    return o, state, W, Tp, Pp, A, G, E, mark, *copies, *cut


def launch_intra(q, k, v, g, beta, lam, q_read, Tp, Pp, A, G, E, copies, *, scale: float, config: LaunchConfig) -> None:
    """T, P' and the decay of every chunk; A where it is given a place; copies of q, k and q_read as operands, likewise."""
    B, T, HV, _ = v.shape
    r, rows = q if q_read is None else q_read, Pp.shape[2]
    q_copy, k_copy, r_copy = (*copies[:2], copies[0] if q_read is None else copies[2])
    constants = intra_constants(
        config,
        q.dtype,
        k.shape[2],
        r.shape[2],
        HV,
        k.shape[3],
        *_flags(g, beta, lam, q_read),
        k_copy is not None,
        A is not None,
    )
    grid = (-(-rows // constants["R"]) * B * HV,)
    run(
        intra, grid,
        r, q, k, _or(g, G), _or(beta, G), _or(lam, G), Tp, Pp, _or(A, Pp), G, E, _or(r_copy, Pp), _or(q_copy, Pp), _or(k_copy, Pp),
        scale, T, rows, **constants,
    )  # fmt: skip


def walk_of(
    q, k, v, g, beta, lam, q_read, Tp, Pp, G, E, o, W, initial_state, state, align, mark, *, scale, config
) -> Callable[[int], None]:
    """What launches the scan in a form: o, the final state and, where it is given a place, W. q, k, q_read are operands' copies; o and v
    share the caller's type."""
    T, HV, V = v.shape[1:]
    (H, K), (rows, C) = k.shape[2:], Pp.shape[2:]
    r = q if q_read is None else q_read
    _, erase, with_lam, read = _flags(g, beta, lam, q_read)
    init, save = initial_state is not None, W is not None
    constants_of = partial(scan_constants, config, v.dtype, H, r.shape[2], HV, K, V, erase, with_lam, read, init, save)
    BV, KB, NK = (constants_of(0)[name] for name in ("BV", "KB", "NK"))
    slots, flag = slots_of(config, "scan", align, HV * -(-V // BV), len(v) * (rows // C))
    hand = q.new_empty(slots, BV, NK * KB, dtype=state.dtype)
    tile = lambda x, D: token_tile(x, C, D) if config.tma else x
    pairs = lambda x: tile(x.view(-1, rows, 1, C), C)
    x_P = pairs(Pp)
    x_o = tile(o, BV)
    arguments = (
        tile(r, KB), tile(q, KB), tile(k, KB), tile(v, BV), pairs(Tp) if erase else x_P, x_P, E,
        x_o, x_o if W is None else tile(W, BV), _or(initial_state, state), state, align.cum, hand, flag, mark,
        scale, T, rows, align.N,
    )  # fmt: skip
    return lambda form: run(scan, (slots,), *arguments, **constants_of(form))


def slots_of(config: LaunchConfig, kernel: str, align: Alignment, per: int, chunks: int) -> tuple[int, Tensor]:
    """Programs of a walk with `per` chains a sequence over `chunks` chunks in all, and the flags by which they pass chains on."""
    chains = align.N * per
    slots = min(config.launch[kernel]["NP"], chains)
    # where each program has one chain, as long as all others, no flag is ever read
    cut = slots < chains or align.N * align.longest != chunks
    return slots, (torch.zeros if cut else torch.empty)(slots, dtype=torch.int32, device=align.cum.device)


def saved_columns(C: int, lam: Tensor | None, q_read: Tensor | None) -> int:
    """Of A: where q both reads and enters x, its own products lie beside x's."""
    return 2 * C if lam is not None and q_read is None else C


def solve(dtype: torch.dtype) -> torch.dtype:
    """Of operands: a bfloat16 inverse, and what it multiplies, would miss the error budget."""
    return torch.float16 if dtype.itemsize == 2 else dtype


def forms(dtype: torch.dtype, lam: int | bool) -> tuple[int, ...]:
    """In which forms kernels are launched: a step with λ may make the state longer, past what float16 operands hold."""
    return (1, 2) if lam and dtype.itemsize == 2 else (0,)


def unmarked(both: tuple[int, ...], device: torch.device) -> Tensor:
    """[1], where there is a second form: 0 until the first leaves its mark."""
    return torch.zeros(len(both) - 1, dtype=torch.int32, device=device)


def inverse(dtype: torch.dtype) -> torch.dtype:
    """Of the inverse and what it multiplies. Where q, k and v are float16 themselves, the budget leaves no room for a rounding more."""
    return torch.float32 if dtype == torch.float16 else solve(dtype)


def inverse_constants(dtype: torch.dtype) -> dict[str, object]:
    """TT, and how its products are made: of float32 as three TF32 ones where all other operands are halves."""
    return {"TT": TYPES[inverse(dtype)], "SOLVE": "tf32x3" if dtype == torch.float16 else "ieee"}


def operands(dtype: torch.dtype, form: int) -> dict[str, object]:
    """ST and TT of a form's products, BT that tensors of operands are declared."""
    given = dict(BT=TYPES[solve(dtype)], ST=TYPES[solve(dtype)], **inverse_constants(dtype), FORM=form)
    return given if form < 2 else given | dict(ST=WIDE, TT=TYPES[torch.float32], SOLVE="tf32x3")


@cache
def intra_constants(config: LaunchConfig, dtype, H, HR, HV, K, gate, erase, lam, read, copy, save) -> dict[str, object]:
    own = {**config.launch["intra"], "BK": min(config.launch["intra"]["BK"], padded(K))}
    return dict(
        H=H, HR=HR, HV=HV, K=K, C=config.launch["shared"]["C"], ACC=TYPES[accumulator(dtype)], ST=TYPES[solve(dtype)],
        COPY=int(copy), SAVE=int(save), GATE=gate, ERASE=erase, LAM=lam, READ=read, **inverse_constants(dtype), **own,
    )  # fmt: skip


@cache
def scan_constants(config: LaunchConfig, dtype, H, HR, HV, K, V, erase, lam, read, init, save, form) -> dict[str, object]:
    own = {name: x for name, x in config.launch["scan"].items() if name != "NP"}
    KB = min(padded(K), 128)
    return dict(
        H=H, HR=HR, HV=HV, K=K, V=V, C=config.launch["shared"]["C"], KB=KB, NK=-(-K // KB), TMA=int(config.tma),
        ACC=TYPES[accumulator(dtype)], OT=TYPES[dtype], ERASE=erase, LAM=lam, READ=read, INIT=int(init), SAVE=int(save),
        **operands(dtype, form), **own,
    )  # fmt: skip


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Both kernels as Q-Delta launches them, the scan in each form, with a state to start from and the backward's tensors asked for."""
    own, st, acc = NAMES[dtype], NAMES[solve(dtype)], NAMES[accumulator(dtype)]
    cases = []
    for kernel, constants in (
        (intra, intra_constants(config, dtype, 2, 2, 2, K, 1, 1, 1, 0, solve(dtype) != dtype, 1)),
        *((scan, scan_constants(config, dtype, 2, 2, 2, K, V, 1, 1, 0, 1, 1, form)) for form in forms(dtype, True)),
    ):
        constants = dict(constants)
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
        types = dict.fromkeys(("p_r", "p_q", "p_k"), f"*{own}") | {"p_T": f"*{NAMES[inverse(dtype)]}"}
        types |= dict.fromkeys(("p_P", "p_A", "p_r_copy", "p_q_copy", "p_k_copy"), f"*{st}")
        types |= dict.fromkeys(("p_g", "p_beta", "p_lam", "p_G", "p_E", "p_initial", "p_final", "p_hand"), f"*{acc}")
        types |= {"p_cum": "*i32", "p_flag": "*i32", "p_wide": "*i32", "scale": "fp32", "T": "i32", "NR": "i32", "N": "i32"}
        C, BV, KB = (constants.get(name) for name in ("C", "BV", "KB"))
        for name, element, width in (
            *((name, st, KB) for name in ("x_r", "x_q", "x_k")),
            *((name, own, BV) for name in ("x_v", "x_o")),
            ("x_w", st, BV),
            ("x_T", NAMES[inverse(dtype)], C),
            ("x_P", st, C),
        ):
            types[name] = f"tensordesc<{element}[1, 1, {C}, {width}]>" if config.tma else f"*{element}"
        cases.append(Case(kernel, {n: types[n] for n in kernel.arg_names if n not in constants}, constants, options))
    return cases


def _alignment(q: Tensor, cu_seqlens: Tensor | None, config: LaunchConfig) -> Alignment:
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    return Alignment.of(cu_seqlens, *q.shape[:2], config.launch["shared"]["C"], q.device)


def _parts(N: int, shape, K: int, cu_seqlens: Tensor | None, config: LaunchConfig) -> int:
    """Into how many segments sequences are cut; packed ones are taken as equally long: their lengths are not read back."""
    from needlework.ops.delta.segments import parts_of

    _, T, HV, V = shape
    launch = config.launch["scan"]
    longest = -(-T // config.launch["shared"]["C"]) // (1 if cu_seqlens is None else max(N, 1))
    return parts_of(N * HV * -(-V // launch["BV"]), longest, K, V, launch["NP"])


def _flags(g, beta, lam, q_read) -> tuple[int, ...]:
    """GATE, ERASE, LAM, READ: q next to q_read only enters x."""
    return tuple(int(x) for x in (g is not None, beta is not None, lam is not None, lam is not None and q_read is not None))


def _or(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel argument that is not read where there is none."""
    return stand_in if x is None else x


@torch.library.register_fake(delta_scalar)
def _results(q, k, v, g, beta, lam, q_read, initial_state, cu_seqlens, scale):
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    return torch.empty_like(v), v.new_empty(N, v.shape[2], k.shape[-1], v.shape[-1], dtype=accumulator(q.dtype))


@torch.library.register_fake(delta_scalar_fwd)
def _(q, k, v, g, beta, lam, q_read, initial_state, cu_seqlens, scale):
    B, T, HV, V = v.shape
    C = launch_config(ENGINE, q.device, q.dtype, q.shape[-1], V).launch["shared"]["C"]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    wide, operand = accumulator(q.dtype), solve(q.dtype)
    nothing = lambda: v.new_empty(0, dtype=operand)
    aligned = T if cu_seqlens is None else (T // C + N) * C
    rows = -(-aligned // C) * C
    erases = 0 if beta is None else B
    shapes = (erases, C, inverse(q.dtype)), (B, C, operand), (erases, saved_columns(C, lam, q_read), operand)
    pairs = [v.new_empty(n, HV, rows, columns, dtype=t) for n, columns, t in shapes]
    numbers = [v.new_empty(B, HV, *s, dtype=wide) for s in ((rows,), (rows // C, ROWS.value, C))]
    mark = v.new_empty(len(forms(q.dtype, lam is not None)) - 1, dtype=torch.int32)
    wanted = (q if q_read is None or lam is not None else None), k, q_read
    copies = [
        nothing() if x is None or x.dtype == operand else x.new_empty(B, aligned, *x.shape[2:], dtype=operand) for x in wanted
    ]
    parts = _parts(N, v.shape, k.shape[-1], cu_seqlens, launch_config(ENGINE, q.device, q.dtype, q.shape[-1], V))
    states = [v.new_empty(N * parts if parts > 1 else 0, HV, k.shape[-1], D, dtype=wide) for D in (V, k.shape[-1])]
    results = _results(q, k, v, g, beta, lam, q_read, initial_state, cu_seqlens, scale)
    return *results, v.new_empty(B, aligned, HV, V, dtype=operand), *pairs, *numbers, mark, *copies, *states


@torch.library.register_fake(delta_scalar_bwd)
def _(do, dstate, saved, q, k, v, g, beta, lam, q_read, initial_state, cu_seqlens, scale):
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, g, beta, lam, q_read, initial_state)]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output[2:], *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dstate, *_):
    saved, (*tensors, cu_seqlens) = ctx.saved_tensors[:SAVED], ctx.saved_tensors[SAVED:]
    do = torch.zeros_like(tensors[2]) if do is None else do.contiguous()
    found = delta_scalar_bwd(do, dstate, list(saved), *tensors, cu_seqlens, ctx.scale)
    found = [dx if needed else None for dx, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return *found, None, None


differentiable(delta_scalar_fwd, _backward, _save)
