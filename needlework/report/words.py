"""Numbers as people write them, and the one sentence that says what a comparison found."""

from .results import Mixer, Results, scores_of, tasks_of

TITLES = {"needle": "single needle", "needles": "several needles"}


def task_title(task: str) -> str:
    """'single needle'; a task without a title of its own is called by its name."""
    return TITLES.get(task, task)


def percent(share: float) -> str:
    """0.9531 -> '95.3 %'. Only all is '100 %' and only nothing '0 %': what rounds to them is written beside them."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def size(count: float) -> str:
    """Bytes in binary units: 16384 -> '16 KiB'."""
    return _in_units(count, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def count(number: float) -> str:
    """Parameters or tokens in decimal units: 59_764_296 -> '59.8M'."""
    return _in_units(number, 1000, ("", "K", "M", "B", "T"))


def _in_units(number: float, base: int, units: tuple[str, ...]) -> str:
    """Three digits, in the largest unit that the number reaches."""
    power = 0
    while number >= base and power + 1 < len(units):
        number, power = number / base, power + 1
    return f"{number:.3g}{units[power]}" if number < 999.5 else f"{number:.0f}{units[power]}"


def multiple(length: int, train_length: int) -> str:
    """A length in multiples of the training length: '8×'."""
    return f"{length / train_length:.3g}×"


def listing(titles: list[str]) -> str:
    """'A', 'A and B', 'A, B and C'."""
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def best(mixers: list[Mixer], task: str, length: int) -> tuple[str, str]:
    """The highest accuracy in a task at a length, and who has it: ('95.3 %', 'A and B'); their number where a list is long."""
    shares = [scores_of(mixer, task)[str(length)]["accuracy"] for mixer in mixers]
    titles = [mixer["title"] for mixer, share in zip(mixers, shares, strict=True) if share == max(shares)]
    return percent(max(shares)), listing(titles) if len(titles) <= 3 else f"{len(titles)} mixers"


def summary(results: Results) -> str:
    """One plain sentence: the best at the shortest length, the best at the longest, the best of the smallest state there."""
    mixers, trained = results["mixers"], results["train_length"]
    if not mixers:
        return "No mixer has finished yet."
    task, first, last = tasks_of(results)[0], results["lengths"][0], results["lengths"][-1]
    asked = "a single needle" if task == "needle" else task_title(task)
    held = [mixer["state_bytes"][str(last)] for mixer in mixers]
    smallest = [mixer for mixer, state in zip(mixers, held, strict=True) if state == min(held)]
    near, far, small = (best(some, task, n) for some, n in ((mixers, first), (mixers, last), (smallest, last)))
    at_last = f"at {multiple(last, trained)}, {far[0]} ({far[1]}); " if last != first else ""
    return (
        f"Asked for {asked} at {multiple(first, trained)} the training length, the best finds {near[0]} of the digits "
        f"({near[1]}); {at_last}with the smallest state there, {size(min(held))}, the best finds {small[0]} ({small[1]})."
    )
