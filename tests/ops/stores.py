"""Which program of a launch stored where, in Triton's interpreter, which runs them in order: on a GPU either of two that store to one place
may be the last. Where a program has changed a number atomically before, it may know that it is. A flag that each sets to one number is
that number."""

import numpy as np
from triton.runtime import interpreter

PAGE = 1 << 16  # bytes


class Stores:
    """Of one launch."""

    def __init__(self) -> None:
        self.program: tuple[int, ...] | None = None  # that stores now
        self.turn, self.waited = 0, False  # its number, from 1 on, and whether it has changed a number atomically
        self.turns: dict[int, np.ndarray] = {}  # page of memory -> of each byte whose turn stored there last, 0: nobody's

    def now(self) -> None:
        """Which program runs."""
        program = interpreter.interpreter_builder.grid_idx
        if program != self.program:
            self.program, self.turn, self.waited = program, self.turn + 1, False

    def atomic(self) -> None:
        self.now()
        self.waited = True

    def again(self, addresses: np.ndarray) -> np.ndarray:
        """At which of these another program has stored, unless this one may know of it; this one stores at them now."""
        self.now()
        found = np.zeros(len(addresses), bool)
        pages, at = np.divmod(addresses.astype(np.int64), PAGE)
        for page in np.unique(pages):
            if page not in self.turns:
                self.turns[page] = np.zeros(PAGE, np.int32)
            turns, here = self.turns[page], pages == page
            found[here] = (turns[at[here]] != 0) & (turns[at[here]] != self.turn) & (not self.waited)
            turns[at[here]] = self.turn
        return found
