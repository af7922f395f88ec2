"""Numbers of a claim as its pages write them, in its measure's unit: points with one digit, nats with three."""

import math

from .answers import Answer
from .asked import Asked


def shown(asked: Asked, value: float, sign: str = "") -> str:
    """A number in multiples of the measure's `times`."""
    times, digits = asked.measure.times, 1 if asked.measure.times > 1 else 3
    return f"{round(times * value, digits) + 0.0:{sign}.{digits}f}"  # no "-0.0"


def spread(asked: Asked, values: tuple[float, ...]) -> str:
    """The mean and the runs' least and most; run by run where they lie further apart than half of the measure's range."""
    floor, ceiling = asked.measure.floor, asked.measure.ceiling
    if floor is not None and ceiling is not None and max(values) - min(values) > abs(ceiling - floor) / 2:
        return " / ".join(shown(asked, value) for value in values)
    mean = math.fsum(values) / len(values)
    return shown(asked, mean) + (f" ({shown(asked, min(values))} to {shown(asked, max(values))})" if len(values) > 1 else "")


def difference(answer: Answer) -> str:
    """The mean ± half its interval, with the unit; nothing where no run is scored."""
    if answer.mean is None:
        return ""
    half = "" if answer.half is None else f" ± {shown(answer.asked, answer.half)}"
    return f"{shown(answer.asked, answer.mean, '+')}{half} {answer.asked.measure.unit}"
