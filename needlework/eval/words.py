"""Numbers as people write them, and the one sentence that says what a comparison found."""

from .results import Mixer, Results


def percent(share: float) -> str:
    """0.9531 -> '95.3 %'."""
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


def best(mixers: list[Mixer], length: int) -> tuple[list[Mixer], float]:
    """The mixers with the highest single-needle accuracy at a length, and that accuracy."""
    top = max(mixer["needle"][str(length)]["accuracy"] for mixer in mixers)
    return [mixer for mixer in mixers if mixer["needle"][str(length)]["accuracy"] == top], top


def titles_of(mixers: list[Mixer]) -> str:
    """Their titles, or their number when a list would bury the sentence."""
    return listing([mixer["title"] for mixer in mixers]) if len(mixers) <= 3 else f"{len(mixers)} mixers"


def summary(results: Results) -> str:
    """One plain sentence: the best at the training length, the best at the longest, the smallest state."""
    mixers, trained = results["mixers"], results["train_length"]
    if not mixers:
        return "No mixer has finished yet."
    first, last = results["lengths"][0], results["lengths"][-1]
    near, near_share = best(mixers, first)
    far, far_share = best(mixers, last)
    smallest = min(mixer["state_bytes"][str(last)] for mixer in mixers)
    small = [mixer for mixer in mixers if mixer["state_bytes"][str(last)] == smallest]
    _, small_share = best(small, last)
    return (
        f"Asked for a single needle at {multiple(first, trained)} the training length, the best finds {percent(near_share)} "
        f"of the digits ({titles_of(near)}); at {multiple(last, trained)}, {percent(far_share)} ({titles_of(far)}); "
        f"and the smallest state there, {size(smallest)}, finds {percent(small_share)} ({titles_of(small)})."
    )
