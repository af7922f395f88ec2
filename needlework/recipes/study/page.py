"""The second study's page: what follows from each verdict, how it was done, what it cannot say."""

from needlework.recipes.study import EXPLORED, PRIMARY, base, capacity, forks, language, mixers, rates, reach, text
from needlework.report.answers_page import Study

ADVICE = {
    "CCQ": ("many pairs in a small fixed state", "CCQ on Gated DeltaNet", "Gated DeltaNet with wider values"),
    "Q-Delta": ("recall in text with a fixed state", "Q-Delta", "Gated DeltaNet"),
    "CARVE": ("keys whose values change", "CARVE", "CARVE blind"),
    "LUCID": ("loss with attention at the training length", "LUCID", "softmax attention"),
    "The composition": (
        "text with mostly fixed states",
        "Q-Delta·CCQ, every 4th layer LUCID",
        "Gated DeltaNet, every 4th layer softmax",
    ),
    "Polar + memory": ("needles far past the training length", "Polar + memory (ATMA)", "softmax + memory"),
}


def _from_to(ends: tuple[float, float]) -> str:
    return " to ".join(f"{end:,g}" for end in ends)


METHOD = "\n".join(
    (
        "Claims, measures, margins and seeds were committed in `needlework/recipes/study/` before the first run. [The runs](runs.md), and what else "
        "they show. A difference above 0 is for the claim.",
        "",
        "- **Pairs** differ in what the claim is about: both have one convolution, gate, layout and, within 2 %, as many bytes of state. Half-lives "
        f"start spread over {_from_to(mixers.SPREAD)} tokens; under Capacity, below, over {_from_to(capacity.SPREAD)}; under Reach as published.",
        f"- **Text**: {text.TRAINING / 1e6:.1f}M tokens, Python source and English of Debian packages, read {text.EPOCHS:g} times at most, but under Reach; "
        f"{100 * text.SPLIT.development:g} % of the documents to choose by, {100 * text.SPLIT.held_out:g} % to test on.",
        f"- **Capacity** (CCQ): two layers; associative recall of {capacity.LOADS[0]} to {capacity.LOADS[-1]} pairs, after "
        f"{capacity.WARM_UP.steps} steps with {capacity.WARM_UP.pairs[-1]} at most.",
        f"- **Forks** (Q-Delta, CARVE): a trunk of {forks.TRUNK:,} steps, then branches of {forks.BRANCH} on the same data. {100 * base.WARM.dense:g} % of the "
        f"trunk's rows are pairs and questions alone until its loss on them is within {base.GATE.excess:g} nats of the least there is. A trunk that is not there by step "
        f"{forks.BY:,} has no branches. A first try, with 480 steps, stopped when six of eight trunks were not there by step 360; its seeds are not used again.",
        f"- **Language** (LUCID, the composition): {language.STEPS:,} steps, {language.STEPS * base.ROWS * base.LENGTH / 1e6:.0f}M tokens. 100M were "
        f"planned, and cut before the first run to what its {language.MINUTES} minutes allow.",
        f"- **Reach** (Polar + memory): the first study's recipe, seeds {reach.SEEDS[0]} to {reach.SEEDS[-1]}, on this study's text, because the first's was the "
        "packages that one machine had installed.",
        f"- **Learning rates**: each family's, from {_from_to((rates.GRID[0], rates.GRID[-1]))}, by the documents to choose by and seeds of their own.",
        "- **Verdicts.** *Holds*, *opposite*: the difference lies beyond its margin with p < 0.05 (Student's t) after Holm's adjustment over all "
        f"{len(PRIMARY)}, run or not. *Negligible*: its 95 % interval lies inside the margin. *Undecided*: neither. *No range*: every run at chance, or at the "
        "ceiling; a text's loss and gain have no known ceiling. There is one interim look, at the first half of the seeds, with p times 50.",
    )
)

LIMITS = "\n".join(
    (
        "- **Size.** 18M parameters; under Reach 60M, under Capacity less than one million. The order at 1B may be another.",
        "- **Text.** Two thirds are Python source; the English is reference and argument.",
        f"- **Language** stops at {language.STEPS * base.ROWS * base.LENGTH / 1e6:.0f}M tokens, while losses fall: a difference may be one of speed. One side of a "
        f"pair may learn a thing in some seeds alone; its picture has every run. Rates differ: LUCID {base.rate('lucid'):g}, softmax {base.rate('softmax'):g}, "
        f"the composition {base.rate('composition'):g}, its control {base.rate('control'):g}.",
        "- **Forks** say what an addition learns in a few hundred steps from a model without it, not what a model trained with it from the start would be.",
        "- **The released Q-Delta**, which is in [the runs](runs.md), is computed in float32 PyTorch, as its partner is; the authors' kernels were not run.",
        "- **One recipe** for all but the learning rate.",
    )
)

BEFORE = (
    "The [first study](first/README.md) trained 21 mixers of 60M parameters with three seeds, and [ten of 125M](first/medium/README.md) with one. Eight of its "
    "nine claims are undecided. [What it does support](first/README.md#what-else-the-runs-show) is on its page."
)

PAGE = Study(
    "Six claims about sequence mixers", PRIMARY, EXPLORED, ADVICE, ("capacity", capacity.CURVE), METHOD, LIMITS, BEFORE
)
