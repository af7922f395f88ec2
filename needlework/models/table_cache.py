"""The cache of `generate` on a GPU: every row a slot and pages of its own in tables that layers advance in place."""

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from needlework.layers.batch import Batch, Pages
from needlework.layers.state import Held
from needlework.models.cache import NeedleworkCache, StateLayer
from needlework.models.config import NeedleworkConfig
from needlework.models.replay import Record, Replay, Step, record
from needlework.ops.common.packing import document_positions

PAGE = 64  # rows of a page
STEADY = 2  # steps of one token on the same tables, after which another is worth the time that recording it takes


class TableLayer(StateLayer):
    """One layer's tables: `fixed` [B …] and `rows` [B NB PG …], by the names of `held`."""

    def __init__(self, held: Held):
        super().__init__()
        self.held, self.fixed, self.rows = held, {}, {}

    def tables(self) -> dict[str, Tensor]:
        """As `Mixer.serve` takes them."""
        return self.fixed | {name: x.flatten(0, 1) for name, x in self.rows.items()}

    def reserve(self, B: int, pages: int, device: torch.device) -> None:
        """Room for `pages` pages of each of B rows; what is held stays."""
        if not self.is_initialized:
            make = lambda part, *sizes: torch.zeros(*sizes, *part.shape, dtype=part.dtype, device=device)
            self.fixed = {name: make(part, B) for name, part in self.held.fixed.items()}
            self.rows = {name: make(part, B, 0, PAGE) for name, part in self.held.rows.items()}
            self.is_initialized = True
        for name, x in self.rows.items():
            self.rows[name] = torch.cat([x, x.new_zeros(B, pages - x.shape[1], *x.shape[2:])], 1)

    def reset(self) -> None:
        super().reset()
        self.fixed, self.rows = {}, {}

    def of_rows(self, f: Callable[[Tensor], Tensor]) -> None:
        """f of every tensor, whose first axis is the batch."""
        self.fixed = {name: f(x) for name, x in self.fixed.items()}
        self.rows = {name: f(x) for name, x in self.rows.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.of_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.of_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.of_rows(lambda x: x[indices])


class TableCache(NeedleworkCache):
    """A NeedleworkCache whose states lie in tables. One token a row then advances them in place, and nothing is copied or read back.

    tokens: how many each row has room for at first; more makes room for twice as many. Holds every row of a window's keys, where
    NeedleworkCache holds the window's. No gradients: ValueError from the ops. On a GPU the third step in a row that finds the tables where
    they were is recorded as a CUDA graph, which the following ones replay.

    >>> import torch
    >>> from needlework.layers import QDelta, Recurrent
    >>> from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, TableCache
    >>> mixers = {"Q": Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta())}
    >>> model = NeedleworkForCausalLM(NeedleworkConfig(vocab_size=257, hidden_size=64, layout="QQ", mixers=mixers))
    >>> cache = TableCache(model.config, model.model.held(), tokens=200)
    >>> model.generate(torch.randint(257, (2, 100)), past_key_values=cache, max_new_tokens=3).shape
    torch.Size([2, 103])
    """

    layers: list[TableLayer]  # pyrefly: ignore[bad-override-mutable-attribute] (as NeedleworkCache)

    def __init__(self, config: NeedleworkConfig, held: list[Held], tokens: int = PAGE):
        super().__init__(config)
        self.layers = [TableLayer(one) for one in held]
        self.windows = {one.window for one in held if one.rows}
        self.pages = max(1, ceil(tokens / PAGE))
        self.length: Tensor | None = None  # [B] int32
        self.record: Record | None = None  # None: as a CUDA graph on a GPU, not at all on a CPU
        self._captured = all(one.captured != "none" for one in held)
        self._steady = 0
        self._replay: Replay | None = None

    def batch(self, B: int, T: int, real: Tensor | None, device: torch.device) -> Batch:
        """The Batch of T new tokens of each of B rows, which are from now on seen; real [B T]: of which those are no pads."""
        seen = self.get_seq_length()
        if self.length is None or seen + T > self.pages * PAGE:
            self._moved()
            while seen + T > self.pages * PAGE:
                self.pages *= 2
            for layer in self.layers:
                layer.reserve(B, self.pages, device)
        fresh = self.length is None
        before = torch.zeros(B, dtype=torch.int32, device=device) if self.length is None else self.length
        if decodes := B if T == 1 and real is None and not fresh else 0:
            ends, document, at = torch.zeros(1, dtype=torch.int64, device=device), torch.arange(B, device=device), before * 0
            self.length = before + 1
        else:
            counts = torch.full((B,), T, device=device) if real is None else real.sum(1)
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            document, at = document_positions(ends, B * T if real is None else int(ends[-1]))
            self.length = before + counts.int()
        position = at + before[document]
        slots = torch.arange(B, device=device)
        table = torch.arange(B * self.pages, dtype=torch.int32, device=device).view(B, self.pages)
        pages = Pages(table, table[document, position // PAGE].long() * PAGE + position % PAGE)
        for layer in self.layers:
            layer.seen += T
        return Batch(
            decodes=decodes, slots=slots, fresh=torch.full_like(slots, fresh, dtype=torch.bool), cu_seqlens=ends,
            length=self.length, positions=position.long(), pages=dict.fromkeys(self.windows, pages),
        )  # fmt: skip

    def advance(self, step: Step, x: Tensor, batch: Batch) -> Tensor:
        """`step` of the rows x [T D] of a batch that `batch` made."""
        recorder = self.record or (record if x.is_cuda else None)
        if batch.decodes < len(x) or recorder is None or not self._captured:
            return step(x, batch)
        if self._replay is None and self._steady == STEADY:
            self._replay = Replay(step, x, batch, recorder)
        self._steady += 1
        return step(x, batch) if self._replay is None else self._replay(x, batch)

    def reset(self) -> None:
        super().reset()
        self.length = None
        self._moved()

    def _moved(self) -> None:
        """The tables are other ones from now on."""
        self._steady, self._replay = 0, None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._of_length(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._of_length(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._of_length(lambda x: x[indices])

    def _of_length(self, f: Callable[[Tensor], Tensor]) -> None:
        self._moved()
        if self.length is not None:
            self.length = f(self.length)
