"""What the delta op's entry points accept, and the one form that every rule of the family comes to.

S_t = Diag(e^{g_t}) S_{t-1} + k_t (w_t ⊙ v_t − S_{t-1}ᵀ e_t)ᵀ        w: write; b: erase, which is all of e if "given"
e_t = e^{g_t} ⊙ b_t ⊙ k_t ("decayed"), b_t ⊙ k_t ("previous"), b_t ("given")
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from needlework.ops.common.packing import sequences
from needlework.ops.common.shapes import check, check_dtypes, check_groups, check_tensor, width
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.runtime.each import each
from needlework.ops.slots.table import check_table
from needlework.ops.unit.reference import unit_rows

Prediction = Literal["decayed", "previous", "given"]


class Rule(NamedTuple):
    """One rule's tensors, heads expanded to HV, in the dtype it computes in."""

    q: Tensor  # [B T HV K] what reads
    k: Tensor  # [B T HV K]
    v: Tensor  # [B T HV V]
    g: Tensor  # [B T HV 1] or [B T HV K]
    erase: Tensor | None  # [B T HV 1] or [B T HV K]; None: nothing is erased
    write: Tensor | None  # [B T HV 1] or [B T HV V]; None: 1


def check_heads(q: Tensor, k: Tensor, v: Tensor, q_read: Tensor | None) -> None:
    """ValueError for what does not fit."""
    check_dtypes(q=q, k=k, v=v, q_read=q_read)
    check("q", q, "B T H K")
    B, T, H, K = q.shape
    check("k", k, "B T H K", B=B, T=T, H=H, K=K)
    check("v", v, "B T HV V", B=B, T=T)
    HV = v.shape[2]
    check_groups(H, HV)
    read = q if q_read is None else q_read
    check("q_read", read, "B T HV K", B=B, T=T, K=K, **({} if read.dim() == 4 and read.shape[2] == H else {"HV": HV}))


def checked_heads(
    q: Tensor, k: Tensor, v: Tensor, q_read: Tensor | None, l2norm: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the read query (q where there is none), expanded to HV heads; ValueError for what does not fit."""
    check_heads(q, k, v, q_read)
    dtype, HV = width(q), v.shape[2]
    q, k, v, read = each(lambda x: x.to(dtype), q, k, v, q_read)
    if l2norm:
        q, k = unit_rows(q), unit_rows(k)
    return each(lambda x: _expand(x, HV), q, k, v, q if read is None else read)


def check_gate(g: Tensor | None, v: Tensor, K: int) -> None:
    B, T, HV = v.shape[:3]
    if g is None:
        return
    check_tensor("g", g, "B T HV")
    if g.dim() == 4:
        check("g", g, "B T HV K", B=B, T=T, HV=HV, K=K)
    else:
        check("g", g, "B T HV", B=B, T=T, HV=HV)


def checked_gate(g: Tensor | None, v: Tensor, K: int) -> Tensor:
    """g as [B T HV 1] or [B T HV K], zeros where there is none."""
    check_gate(g, v, K)
    if g is None:
        return v.new_zeros(*v.shape[:3], 1)
    return g.to(v.dtype) if g.dim() == 4 else g.to(v.dtype)[..., None]


def check_number(name: str, x: Tensor, v: Tensor) -> None:
    check(name, x, "B T HV", B=v.shape[0], T=v.shape[1], HV=v.shape[2])


def checked_number(name: str, x: Tensor, v: Tensor) -> Tensor:
    """A number a token and value head, as [B T HV 1]."""
    check_number(name, x, v)
    return x.to(v.dtype)[..., None]


def check_state(initial_state: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """The sizes [N HV K V] that the state has or must have."""
    sizes = {"N": sequences(cu_seqlens, len(v)), "HV": v.shape[2], "K": k.shape[-1], "V": v.shape[-1]}
    if initial_state is not None:
        check("initial_state", initial_state, "N HV K V", **sizes)
    return list(sizes.values())


def checked_state(initial_state: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """initial_state [N HV K V] in the computing dtype, zeros where there is none."""
    sizes = check_state(initial_state, k, v, cu_seqlens)
    return v.new_zeros(*sizes) if initial_state is None else initial_state.to(v.dtype)


def check_states(
    state: Tensor | None, slots: Tensor | None, fresh: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *,
    initial_state: Tensor | None, output_final_state: bool, inputs: Iterable[Tensor | None],
) -> int:  # fmt: skip
    """How many sequences a call has; ValueError for an initial state or a table that does not fit."""
    N, HV, K, V = check_state(initial_state, k, v, cu_seqlens)
    check_table(
        state, slots, fresh, N,
        dtype=width(k), initial_state=initial_state, output_final_state=output_final_state, inputs=inputs,
    )  # fmt: skip
    if state is not None:
        check("state", state, "slots HV K V", HV=HV, K=K, V=V)
    return N


def check_rule(inputs: DeltaInputs, prediction: Prediction) -> None:
    """ValueError for what does not fit, or excludes each other. The rule has no lam."""
    v, beta, erase, write = inputs.v, inputs.beta, inputs.erase, inputs.write
    if prediction not in get_args(Prediction):
        raise ValueError(f"prediction: got {prediction!r}, expected 'decayed', 'previous' or 'given'")
    if prediction == "given" and erase is None:
        raise ValueError("prediction: 'given' takes the direction of the erase from erase, which is not given")
    if (erase is None) != (write is None):
        raise ValueError("erase and write: one is given without the other")
    if beta is not None and erase is not None:
        raise ValueError("beta: erase and write are given, which take its place")
    check_heads(inputs.q, inputs.k, v, inputs.q_read)
    (B, T, HV, V), K = v.shape, inputs.k.shape[-1]
    if beta is not None:
        check_number("beta", beta, v)
    elif erase is not None and write is not None:
        check("erase", erase, "B T HV K", B=B, T=T, HV=HV, K=K)
        check("write", write, "B T HV V", B=B, T=T, HV=HV, V=V)
    check_gate(inputs.g, v, K)


def checked(inputs: DeltaInputs, prediction: Prediction, l2norm: bool = False) -> Rule:
    """The rule that these arguments mean; ValueError for what does not fit."""
    check_rule(inputs, prediction)
    _, k, v, read = checked_heads(inputs.q, inputs.k, inputs.v, inputs.q_read, l2norm)
    erase, write = inputs.erase, inputs.write
    if inputs.beta is not None:
        erase = write = checked_number("beta", inputs.beta, v)
    elif erase is not None and write is not None:
        erase, write = erase.to(v.dtype), write.to(v.dtype)
    return Rule(read, k, v, checked_gate(inputs.g, v, k.shape[-1]), erase, write)


def direction(erase: Tensor, k: Tensor, prediction: Prediction) -> Tensor:
    """e, but for the decay that "decayed" has before it."""
    return erase if prediction == "given" else erase * k


def _expand(x: Tensor, HV: int) -> Tensor:
    """[B T H ...] -> [B T HV ...]: value head j has key head j // (HV // H)."""
    return x if x.shape[2] == HV else x.repeat_interleave(HV // x.shape[2], 2)
