"""Numbers as people write them, and the one sentence that says what a comparison found."""

from .results import Mixer, Results


def percent(share: float) -> str:
    """0.9531 -> '95.3 %'."""
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def size(count: float) -> str:
    """Bytes in binary units: 16384 -> '16 KiB'."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def count(number: float) -> str:
    """Parameters or tokens in decimal units: 59_764_296 -> '59.8M'."""
    unit = ""
    for larger in ("K", "M", "B", "T"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.3g}{unit}"


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
