"""Memory -> slots, what is sampled of them, and pages: what is left beside the weights, a step and its graphs holds as many sequences as it
can."""

from collections.abc import Sequence

from needlework.layers.state import Held
from needlework.serve.capacity import NEWEST, Pool, SchedulerConfig
from needlework.serve.pools import most_pages
from needlework.serve.sampling import Counts
from needlework.serve.step import Window
from needlework.serve.tables import page_lines, slot_line


def plan(
    held: Sequence[Held],
    *,
    vocabulary: int,
    memory: int,
    weights: int,
    peak: int,
    graphs: int,
    length: int,
    batch: int,
    snapshots: int = 0,
    page: int = 64,
    align: int = 64,
    budget: int = 2048,
    host_bytes: int = 0,
) -> SchedulerConfig:
    """The slots and pages that `memory` bytes hold beside `weights`, a step's `peak` and its `graphs`.

    vocabulary: tokens, which the penalties of each slot count. batch, snapshots: the slots wanted; fewer are planned where a full-length
    request, and for each further slot the pages of a first chunk, leave no room. Every slot has the pages of its windows. What is left
    becomes pages of layers that see every token, at most those of `length` tokens a slot.
    snapshots: 0 where a layer of `held` is rewritten, or `Tables` refuses the plan.
    Raises ValueError, with the bytes, if one request of `length` tokens does not fit.
    """
    states, sampling = slot_line(held).nbytes, Counts.nbytes(vocabulary) + NEWEST
    slot, pages = states + sampling, {window: line.nbytes for window, line in page_lines(held, page).items()}
    first = min(length, budget)
    full = {window: most_pages(length, window, page, budget) for window in pages}
    further = {window: most_pages(first if window is None else length, window, page, 1) for window in pages}

    def sequence(need: dict[Window, int]) -> int:
        return slot + sum(n * pages[window] for window, n in need.items())

    left = memory - weights - peak - graphs - NEWEST
    if left < sequence(full):
        raise ValueError(
            f"one request of {length} tokens needs {sequence(full):,} bytes: a slot of {states:,} of states and {sampling:,} for sampling, and "
            f"{', '.join(f'{n} pages of {pages[window]:,} for window {window}' for window, n in full.items()) or 'no pages'}; "
            f"{memory:,} bytes less {weights:,} of weights, {peak:,} of a step's peak, {graphs:,} of graphs and {NEWEST} of padding "
            f"leave {left:,}"
        )
    more = batch + snapshots - 1
    if sequence(further):
        more = min(more, (left - sequence(full)) // sequence(further))
    counts = {window: full[window] + more * further[window] for window in pages}
    if None in pages:
        spare = left - slot * (1 + more) - sum(n * pages[window] for window, n in counts.items())
        counts[None] = min(counts[None] + spare // pages[None], full[None] * (1 + more))
    return SchedulerConfig(
        length=length,
        batch=min(batch, 1 + more),
        slots=1 + more,
        slot_bytes=states,
        count_bytes=Counts.nbytes(vocabulary),
        pools=tuple(Pool(window, n, pages[window]) for window, n in counts.items()),
        page=page,
        align=align,
        budget=budget,
        prefix=snapshots > 0,
        shared=not any(one.rewritten for one in held),
        host_bytes=host_bytes,
    )
