"""Where the host writes steps before the device copies them: buffers that are made once a shape and used in turn."""

from needlework.serve.batch import Inputs, Shape

TURNS = 2  # the device may still read the last one


class Staging:
    """pinned: for a GPU, which then copies while the host goes on."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._made: dict[Shape, list[Inputs]] = {}

    def take(self, shape: Shape) -> Inputs:
        """Inputs that no step in flight reads."""
        turns = self._made.setdefault(shape, [])
        if len(turns) < TURNS:
            turns.append(Inputs.empty(shape, pin_memory=self._pinned))
        else:
            turns.append(turns.pop(0))
        turns[-1].wait()
        return turns[-1]
