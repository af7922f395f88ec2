"""PaTH attention on pages shared by many sequences, as serving wants it: prefill and decoding by block table. No gradient.

Pages are written again: where a sequence's block of 64 tokens ends, all of its keys are carried on. A page has one owner.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import Impl, resolve
from needlework.ops.attention.pages import positions
from needlework.ops.common.packing import lengths, pad, unpad
from needlework.ops.common.shapes import check, check_dtypes, check_slots, check_tensor, width
from needlework.ops.paged.placement import Placement, check_placement, check_placement_data
from needlework.ops.path.arguments import NewTokens, PathInputs, check_decay, check_gates, check_keys, check_queries, check_read
from needlework.ops.path.chunk import History
from needlework.ops.path.gates import sums
from needlework.ops.path.kept import After
from needlework.ops.path.state import BLOCK, Tables
from needlework.ops.path.step import advance
from needlework.ops.runtime.each import Ts, each
from needlework.ops.runtime.launch_configs import misfit


@torch.no_grad()
def paged_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor,
    *,
    k_pages: Tensor,
    v_pages: Tensor,
    w_slots: Tensor,
    beta_slots: Tensor,
    slots: Tensor,
    block_table: Tensor,
    length: Tensor,
    rows: Tensor,
    g: Tensor | None = None,
    decay_pages: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`chunk_path` of the newest tokens of N sequences, after what their pages hold; the pages then hold the new tokens too.

    q: [T Hq K]; k, v: [T Hkv K], [T Hkv V]; beta: [T Hkv]; w: [T Hkv K], of unit norm: the new tokens, as `chunk_path` takes them.
    k_pages: [n PG Hkv K] float32 (float64 for float64), v_pages: [n PG Hkv V]: all pages, PG a multiple of 16; token t of sequence n lies
        in row t mod PG of page block_table[n, t // PG]. Pages may lie any distance apart. No page belongs to two sequences: its keys
        are written again when later tokens end a block.
    w_slots: [slots 64 Hkv K], beta_slots: [slots 64 Hkv]: a sequence's open block, in its slot.
    slots: [N] int64; −1: a padded row.
    block_table: [N NB] int32. Entries past a sequence's length, and those wholly before the window of its first new token, are not read.
    length: [N] int32 or int64: tokens of each sequence, the new ones included, at most NB · PG; −1: a padded row.
    rows: [T] int64: the row that takes each new token's k and v, page · PG + row in the page; −1: none does.
    g: [T Hq] log forget gates, and decay_pages: [n PG Hq] float64, the sums of the gates up to each row's token: both or none.
    cu_seqlens: [N+1]: sequence n's new tokens are cu_seqlens[n] … cu_seqlens[n + 1); those from cu_seqlens[N] on are nobody's, and
        zeros. None: decoding, one new token a sequence, T = N.
    window, scale: as in `chunk_path`.
    Returns o [T Hq V] in q's dtype; zeros in padded rows. No gradient. Error as `chunk_path`.
    impl: "triton" reads the pages through the table, reads nothing back, and can be captured in a CUDA graph; decoding splits long pages
        over programs. "torch" gathers the pages; "auto" takes the kernels on a CUDA device where they support the call.
    Raises ValueError for shapes or dtypes that do not fit; "torch" also for values of the tables that do not.

    >>> import torch
    >>> from torch.nn.functional import normalize
    >>> from needlework.ops.path import chunk_path, paged_path
    >>> q, k, v = torch.randn(100, 4, 32), torch.randn(100, 2, 32), torch.randn(100, 2, 32)  # [T heads channels]: one sequence
    >>> beta, w = 2 * torch.rand(100, 2), normalize(torch.randn(100, 2, 32), dim=-1)
    >>> pages = {"k_pages": torch.zeros(9, 16, 2, 32), "v_pages": torch.zeros(9, 16, 2, 32)}  # [n PG Hkv d]
    >>> slot = {"w_slots": torch.zeros(4, 64, 2, 32), "beta_slots": torch.zeros(4, 64, 2), "slots": torch.tensor([2])}
    >>> table = torch.tensor([[3, 0, 8, 5, 2, 7, 1]], dtype=torch.int32)
    >>> rows = (table[0, :, None] * 16 + torch.arange(16)).flatten()  # of the sequence's tokens, in order
    >>> o = []
    >>> for start, end in ((0, 60), (60, 99), (99, 100)):  # prefill in two calls, then a token
    ...     where = {"block_table": table, "length": torch.tensor([end]), "rows": rows[start:end]}
    ...     new = [x[start:end] for x in (q, k, v, beta, w)]
    ...     o.append(paged_path(*new, **pages, **slot, **where, cu_seqlens=torch.tensor([0, end - start])))
    >>> torch.allclose(torch.cat(o), chunk_path(*(x[None] for x in (q, k, v, beta, w))).o[0], atol=1e-5)
    True
    """
    check_tensor("q", q, "T Hq K")
    check_keys(k, v, beta, w, "T Hkv")
    check_queries(q, k, "T Hq")
    check_gates(g, q, "T Hq")
    check_read(window, scale)
    tables = Tables(k_pages, v_pages, w_slots, beta_slots, decay_pages)
    where = Placement(block_table, length, rows, cu_seqlens)
    check_tables(k, v, tables, slots, where, g)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if resolve("path", impl, q.device, lambda: _unsupported(q, v, cu_seqlens)) == "triton":
        tokens, placed = NewTokens.of(q, k, v, beta, w, g), (*for_kernels(where), slots.contiguous())
        if cu_seqlens is None:
            from needlework.ops.path.engine.decode import path_decode

            return path_decode(*tokens, *tables, None, *placed, block_table.shape[1] * k_pages.shape[1], window, scale)
        from needlework.ops.path.engine.pages import path_prefill

        return path_prefill(*tokens, *tables, *placed, window, scale)
    check_placement_data(where, len(q), *k_pages.shape[:2])
    found = Gathered.of(k, tables, slots, where, window)
    o = q.new_zeros(len(q), q.shape[1], v.shape[2])
    if found.some:
        inputs, past = PathInputs(*found.tokens(q, k, v, beta, w)), found.history
        if g is not None and decay_pages is not None:
            past = past._replace(decay=found.rows(decay_pages))
            decay = sums(*found.tokens(g), past, window, None)
            found.write(decay, decay_pages)
            inputs = inputs._replace(decay=decay)
        read, kept = advance(inputs, past, found.new, scale, chunk_size=64)
        found.put(o, read)
        found.keep(kept, inputs.v)
    return o


def check_tables(
    k: Tensor, v: Tensor, tables: Tables, slots: Tensor, where: Placement, g: Tensor | None = None, values: str = "v_pages"
) -> None:
    """Raise ValueError unless pages, slots and tables fit the tokens; values: the name of their pages."""
    T, Hkv, K = k.shape
    k_pages, v_pages, w_slots, beta_slots, decay_pages = tables
    check_decay("decay_pages", decay_pages, g, "n PG Hq", n=len(k_pages), PG=k_pages.shape[1])
    check("k_pages", k_pages, "n PG Hkv K", Hkv=Hkv, K=K)
    check(values, v_pages, "n PG Hkv V", n=len(k_pages), PG=k_pages.shape[1], Hkv=Hkv, V=v.shape[2])
    check("w_slots", w_slots, "slots C Hkv K", C=BLOCK, Hkv=Hkv, K=K)
    check("beta_slots", beta_slots, "slots C Hkv", slots=len(w_slots), C=BLOCK, Hkv=Hkv)
    check_dtypes(**{"k": k, values: v_pages, "w_slots": w_slots})
    for name, x in {"k_pages": k_pages, "beta_slots": beta_slots}.items():
        if x.dtype != width(k):
            raise ValueError(f"{name}: expected {width(k)} beside tokens of {k.dtype}, got {x.dtype}")
    check_placement(
        where, T, {"k_pages": k_pages, values: v_pages} | ({} if decay_pages is None else {"decay_pages": decay_pages})
    )
    check_tensor("slots", slots, "N")
    check_slots(slots, len(where.block_table), "N")
    for name, x in {"w_slots": w_slots, "beta_slots": beta_slots}.items():
        if not x[:1].is_contiguous():
            raise ValueError(f"{name}: expected each slot contiguous, got strides {x.stride()}")


def for_kernels(where: Placement) -> Placement:
    """In the integers that kernels are compiled for, contiguous."""
    ends = None if where.cu_seqlens is None else where.cu_seqlens.to(torch.int64)
    return Placement(*each(Tensor.contiguous, where.block_table, where.length.to(torch.int32), where.rows, ends))


def _unsupported(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> str | None:
    """Why the kernels cannot take a call, None if they can."""
    engine = "path/step" if cu_seqlens is None else "path/engine"
    return misfit(engine, q.device, q.dtype, q.shape[-1], v.shape[-1])


class Gathered(NamedTuple):
    """A call's sequences as a padded batch, with the rows of their pages that a window shows, and the way back."""

    history: History
    tables: Tables
    slots: Tensor
    where: Placement
    ends: Tensor  # [N+1]
    new: Tensor  # [N]
    live: Tensor  # [N] bool: no padded row
    page: Tensor  # [N P] where the rows of the history lie
    row: Tensor
    seen: Tensor  # [N P] bool

    @classmethod
    def of(cls, k: Tensor, tables: Tables, slots: Tensor, where: Placement, window: int | None) -> "Gathered":
        PG, wide, ends = tables.k_pages.shape[1], width(k), where.ends(len(k))
        live, new = where.length >= 0, lengths(ends).long()
        past = (where.length.long() - new).clamp(min=0)
        most = int(past.max()) if len(past) else 0
        at = positions(past, most if window is None else min(most, window), window)
        # of the newest W tokens the oldest is before the window of the first new one
        seen = (at >= 0 if window is None else at > (past[:, None] - window).clamp(min=-1)) & live[:, None]
        at = torch.where(seen, at, 0)
        page = torch.where(seen, where.block_table.long().gather(1, at // PG), 0) if most else at
        take = lambda x: torch.where(seen[..., None, None], x[page, at % PG].to(wide), 0)
        opened = each(lambda x: x[slots.clamp(min=0)].to(wide), tables.w_slots, tables.beta_slots)
        history = History(take(tables.k_pages), take(tables.v_pages), *opened, length=past, window=window)
        return cls(history, tables, slots, where, ends, new, live, page, at % PG, seen)

    @property
    def some(self) -> int:
        """Tokens that are somebody's."""
        return int(self.ends[-1])

    def rows(self, pages: Tensor) -> Tensor:
        """The history's rows of other pages [n PG ...]: [N P ...]."""
        x = pages[self.page, self.row]
        return torch.where(self.seen.view(*self.seen.shape, *[1] * (x.dim() - 2)), x, 0)

    def tokens(self, *tensors: *Ts) -> tuple[*Ts]:
        """[T ...] -> [N Tmax ...] in the dtype that is computed in."""
        return each(lambda x: pad(x[None, : self.some].to(self.history.page_k.dtype), self.ends), *tensors)

    def put(self, out: Tensor, x: Tensor) -> None:
        """x [N Tmax ...] into out [T ...], zeros where a row is padded."""
        real = self.live.repeat_interleave(self.new)
        out[: self.some] = torch.where(real.view(-1, *[1] * (out.dim() - 1)), unpad(x, self.ends)[0], 0).to(out.dtype)

    def write(self, x: Tensor, pages: Tensor) -> None:
        """The new tokens' x [N Tmax ...] into their rows of pages."""
        rows, PG = self.where.rows[: self.some], pages.shape[1]
        token = (self.live.repeat_interleave(self.new) & (rows >= 0)).nonzero()[:, 0]
        pages[rows[token] // PG, rows[token] % PG] = unpad(x, self.ends)[0, token].to(pages.dtype)

    def keep(self, kept: After, v: Tensor) -> None:
        """The state after the call: new rows, those of the history where a block has ended, and the open blocks."""
        k_pages, v_pages, *opened = self.tables[:4]
        past = self.history.length
        again = self.seen & ((past + self.new) // BLOCK > past // BLOCK)[:, None]
        k_pages[self.page[again], self.row[again]] = kept.page_k[again].to(k_pages.dtype)
        self.write(kept.k, k_pages)
        self.write(v, v_pages)
        own = self.live & (self.slots >= 0)
        for table, x in zip(opened, (kept.w, kept.beta), strict=True):
            table[self.slots[own]] = x[own].to(table.dtype)
