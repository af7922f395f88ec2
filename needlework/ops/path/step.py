"""PaTH attention one token at a time, on a table of slots that changes in place.

    the query to the open block's start, q⁰ = q − (q Wᵀ) U; it reads the pages, which are left alone; once in BLOCK tokens k̃ ← k̃ − (k̃ Uᵀ)
    W

That is the same as carrying every key at every token (`recurrent_path`), which would read and write all of them each time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import resolve
from needlework.ops.attention.pages import positions
from needlework.ops.common.shapes import check_slots, check_tensor, width
from needlework.ops.paged.placement import Placement
from needlework.ops.path.arguments import NewTokens, PathInputs, check_gates, check_keys, check_queries, check_read, check_state
from needlework.ops.path.chunk import History, forward
from needlework.ops.path.gates import sums
from needlework.ops.path.kept import After, after
from needlework.ops.path.state import BLOCK, PathState, Tables
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.launch_configs import misfit
from needlework.ops.slots.table import Live
from needlework.ops.unit.reference import unit_rows


@torch.no_grad()
def step_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    state: PathState,
    g: Tensor | None = None,
    slots: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    l2norm: bool = False,
) -> Tensor:
    """One token of `chunk_path` for every row of a batch, on a table of slots that changes in place.

    q: [B Hq K]; k, v: [B Hkv K], [B Hkv V]; beta: [B Hkv]; w: [B Hkv K]; g: [B Hq] or None; window, scale, l2norm as in `chunk_path`.
    state: PathState with one row per slot, P rows of pages each: the capacity, or the ring of a window (P >= W: the first W).
    slots: [B] int64, the slot of each row; −1 is a padded row, which reads and writes no slot and returns zeros. None: row b is
        slot b.
    Returns o [B Hq V] in q's dtype; no gradient.
    State: the token's k and v are written at row length (mod W), β and w at row length mod 64 of the open block, and length grows by 1.
        Where that closes the block, the slot's keys are carried on. With g the sum of the row before and g is written beside k.
    Raises ValueError for shapes or dtypes that do not fit, and for a full table; kernels on a GPU read nothing back: there a full slot
    drops its oldest token. They leave rows of w and beta behind the open block's tokens as they are.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import PathState, chunk_path, step_path
    >>> q, k, v = torch.randn(1, 100, 4, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)  # [B T heads channels]
    >>> beta, w = 2 * torch.rand(1, 100, 2), normalize(torch.randn(1, 100, 2, 32), dim=-1)
    >>> pages, block = (torch.zeros_like(k), torch.zeros_like(v)), (torch.zeros(1, 64, 2, 32), torch.zeros(1, 64, 2))
    >>> state = PathState(*pages, *block, torch.zeros(1, dtype=torch.int64))  # one slot with room for 100 tokens
    >>> steps = [step_path(*(x[:, t] for x in (q, k, v, beta, w)), state=state) for t in range(100)]
    >>> torch.allclose(torch.stack(steps, 1), chunk_path(q, k, v, beta, w).o, atol=1e-5)
    True
    """
    check_tensor("q", q, "B Hq K")
    check_keys(k, v, beta, w, "B Hkv")
    check_queries(q, k, "B Hq")
    check_gates(g, q, "B Hq")
    check_read(window, scale)
    check_state("state", state, k, v, g)
    check_slots(slots, len(q))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if resolve("path", "auto", q.device, lambda: _no_step(q, v, state)) == "triton":
        w = unit_rows(w) if l2norm else w
        return _kernels(NewTokens.of(q, k, v, beta, w, g), state, slots, window, scale)
    live = Rows.of(state.k, state.length, slots, len(q), window)
    P, slot, length = live.P, live.slots, live.length
    w = unit_rows(w) if l2norm else w
    wide = width(q)
    inputs = PathInputs(*each(lambda x: x[live.real, None].to(wide), q, k, v, beta, w))
    page_k, page_v = live.pages(state.k, state.v, dtype=wide)
    past = History(page_k, page_v, state.w[slot].to(wide), state.beta[slot].to(wide), length, window)
    if g is not None and state.decay is not None:
        (page_decay,) = live.pages(state.decay, dtype=torch.float64)
        past = past._replace(decay=page_decay)
        inputs = inputs._replace(decay=sums(g[live.real, None], past, window, None))
    o, kept = advance(inputs, past, torch.ones_like(length), scale, chunk_size=1)
    row, closed = length % P, (length + 1) % BLOCK == 0
    state.k[slot[closed], :P] = kept.page_k[closed].to(state.k.dtype)
    state.k[slot, row] = kept.k[:, 0].to(state.k.dtype)
    state.v[slot, row] = v[live.real].to(state.v.dtype)
    state.w[slot], state.beta[slot] = kept.w.to(state.w.dtype), kept.beta.to(state.beta.dtype)
    if state.decay is not None and inputs.decay is not None:
        state.decay[slot, row] = inputs.decay[:, 0]
    state.length[slot] += 1
    return live.spread(o[:, 0].to(q.dtype))


def _no_step(q: Tensor, v: Tensor, state: PathState) -> str | None:
    """Why the kernels cannot take a step, None if they can."""
    if not (state.v.dtype == state.w.dtype == q.dtype and state.k.dtype == state.beta.dtype == width(q)):
        return f"the table is {', '.join(str(x.dtype) for x in state[:4])} beside tokens of {q.dtype}"
    if not all(x is None or x[:1].is_contiguous() for x in (*state[:4], state.decay)):
        return "a slot of the table is not contiguous"
    return misfit("path/step", q.device, q.dtype, q.shape[-1], v.shape[-1])


def _kernels(tokens: NewTokens, state: PathState, slots: Tensor | None, window: int | None, scale: float) -> Tensor:
    """A slot is a sequence's one page. On a GPU nothing is read back: a full slot drops its oldest token."""
    from needlework.ops.path.engine.decode import path_decode

    q = tokens.q
    slots = torch.arange(len(q), device=q.device) if slots is None else slots.long()
    P = min(state.k.shape[1], window or state.k.shape[1])
    if q.device.type == "cpu":
        Rows.of(state.k, state.length, slots, len(slots), window)
    own, PG = slots.clamp(min=0), state.k.shape[1]
    before = state.length[own]
    rows = torch.where(slots >= 0, own * PG + before % P, -1)
    held = torch.where(slots >= 0, before + 1, -1).to(torch.int32)
    where = Placement(own[:, None].to(torch.int32), held, rows, None)
    o = path_decode(*tokens, *Tables(*state[:4], state.decay), None, *where, slots, P, window, scale)
    state.length.index_add_(0, own, (slots >= 0).to(state.length.dtype))
    return o


class Rows(NamedTuple):
    """The rows of a step that own a slot, and what their slots hold; a padded row (slot −1) is left out."""

    real: Tensor  # [B] bool
    slots: Tensor  # [live] int64
    length: Tensor  # [live]
    P: int  # rows of pages that a slot uses
    window: int | None

    @classmethod
    def of(cls, pages: Tensor, length: Tensor, slots: Tensor | None, B: int, window: int | None) -> "Rows":
        """Raises ValueError for a slot without room. pages: the table's keys."""
        live, P = Live.of(slots, B, pages.device), min(pages.shape[1], window or pages.shape[1])
        held = length[live.slots]
        if len(held) and P != window and int(held.max()) >= P:
            raise ValueError(
                f"state.k: axis 1 (P) has capacity {P}, but a sequence of length {int(held.max())} needs a row more"
            )
        return cls(live.rows, live.slots, held, P, window)

    def pages(self, *tables: *Ts, dtype: torch.dtype) -> tuple[*Ts]:
        """[live P ...] of tables, zeros in rows without a token: what lies there may be anything."""
        filled = positions(self.length, self.P, self.window) >= 0
        like = lambda x: filled.view(*filled.shape, *[1] * (x.dim() - 2))
        return each(lambda x: torch.where(like(x), x[self.slots, : self.P].to(dtype), 0), *tables)

    def spread(self, x: Tensor) -> Tensor:
        """[live ...] -> [B ...], zeros in padded rows."""
        return Live(self.real, self.slots).spread(x)


def advance(inputs: PathInputs, past: History, new: Tensor, scale: float, *, chunk_size: int) -> tuple[Tensor, After]:
    """o of `new` [B] tokens of each row [B T ...], and the state after them."""
    q = inputs.q
    with torch.autocast(q.device.type, enabled=False):
        inputs = inputs._replace(q=q * scale)
        o, _ = forward(inputs, past, chunk_size=chunk_size)
        return o, after(past, new, inputs.k, inputs.beta, inputs.w, chunk_size=chunk_size)
