"""The claims on a sweep's page: a row each, with the difference, its interval and the verdict in one word."""

from collections import Counter

from .claims import Claim, Verdict, judge
from .markdown import percents, points, table
from .sweep import Sweep
from .words import listing


def claims_section(sweep: Sweep, claims: tuple[Claim, ...]) -> str:
    """How many claims have which verdict, how they were judged, and a row a claim."""
    verdicts = judge(sweep, claims)
    if not verdicts:
        return "No claim was made before the runs."
    words = Counter(verdict.word for verdict in verdicts)
    head = ("claim", "measured by", "finds", "against", "difference, points", "p", "seeds", "range", "")
    counts = f"Of {len(claims)} claim{'s' if len(claims) > 1 else ''}: {', '.join(f'{n} × {word}' for word, n in words.most_common())}."
    pairing = {True: "over pairs of one seed", False: "between seeds that have nothing in common"}
    how = listing([pairing[paired] for paired in sorted({claim.paired for claim in claims}, reverse=True)])
    inside = listing(sorted({f"{100 * claim.negligible:g}" for claim in claims}))
    return f"{counts} {_JUDGED.format(how=how, inside=inside)}\n\n{table(head, [_claim(verdict) for verdict in verdicts])}"


_JUDGED = (
    "A claim compares two mixers.\n\n"
    "- Shares are points above chance: 100 · (found − chance)/(1 − chance).\n"
    "- A difference is taken {how}, with ± half its 95 % interval (Student's t, this claim alone). p is after Holm's adjustment over the "
    "claims that have one.\n"
    "- *Holds*, *opposite*: p < 0.05. *Negligible*: the interval lies inside ± {inside}. *Undecided*: neither. *No range*: every run of both "
    "sides is at chance, or every one at the ceiling.\n"
    "- Range counts the pairs of task and length at which both sides' means are at chance, or both at the ceiling. Such a pair cannot tell "
    "the mixers apart."
)


def _claim(verdict: Verdict) -> tuple[str, ...]:
    claim, better, worse, difference = verdict.claim, verdict.better, verdict.worse, verdict.difference
    measured = f"{', '.join(claim.tasks)} at {', '.join(f'{m:g}×' for m in claim.multiples)}"
    if better is None or worse is None or difference is None:
        return claim.says, measured, "", "", "", "", "", "", f"**{verdict.word}**"
    ends = [f"{n} at {end}" for n, end in ((verdict.low, "chance"), (verdict.high, "the ceiling")) if n]
    return (
        claim.says,
        measured,
        *(percents(side, 0.0) for side in (better, worse)),
        points(difference),
        "" if verdict.p is None else f"{verdict.p:.2g}",
        str(difference.n),
        f"{', '.join(ends)}, of {verdict.cells}" if ends else "",
        f"**{verdict.word}**",
    )
