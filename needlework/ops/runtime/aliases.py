"""Results of a recorded call that are views of what it made: memory is asked for in the shape of the result at once."""

from collections import defaultdict
from typing import NamedTuple

import torch

from needlework.ops.runtime.recording import Allocation, Call, Chain, Launch, Place, Register, Step


class View(NamedTuple):
    """Where its numbers lie, and how."""

    place: Place
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def folded(steps: list[Step], results: set[Register], views: dict[Register, View]) -> list[Step]:
    """The same steps with memory in the shape of the one result that is a view of all of it, where launches alone see it beside that."""
    memory = lambda registers: {views[x].place[0] if x in views else x for x in registers}
    shaping: defaultdict[int, list[Step]] = defaultdict(list)  # memory -> what makes views of it
    seen: set[int] = set(results)  # memory that is taken as it was made
    for step in steps:
        if isinstance(step, Call):
            own = memory(step.makes())
            if not step.function._schema.is_mutable and own == memory(step.uses()) and len(own) == 1:
                shaping[own.pop()].append(step)
            else:
                seen |= memory(step.uses())
    made = {step.made: step for step in steps if isinstance(step, Allocation) and step.made not in seen}
    shaped: dict[Register, Allocation] = {}
    for origin, whole in made.items():
        found = [x for step in shaping[origin] for x in step.makes() if x in results]
        if len(found) == 1 and views[found[0]].place == (origin, 0):
            _, size, stride, dtype = views[found[0]]
            own = whole._replace(made=found[0], size=size, stride=stride, dtype=dtype)
            if own.bytes == whole.bytes:
                shaped[origin] = own
    gone = {id(step) for origin in shaped for step in shaping[origin]}
    there = {origin: (own.made, 0) for origin, own in shaped.items()}
    return [_where(step, shaped, there) for step in steps if id(step) not in gone]


def _where(step: Step, shaped: dict[Register, Allocation], there: dict[Register, Place]) -> Step:
    if isinstance(step, Allocation):
        return shaped.get(step.made, step)
    return step.elsewhere(there) if isinstance(step, Launch | Chain) else step
