"""The second study's page: what follows from each verdict, how it was done, what it cannot say."""

from needlework.recipes.study import EXPLORED, PRIMARY, base, capacity, forks, language, pilot, rates, reach, text
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

METHOD = "\n".join(
    (
        "Claims, measures, margins and numbers of seeds are in `needlework/recipes/study/`, and were committed before the first run.",
        "",
        f"- **Text.** {text.TRAINING / 1e6:.1f}M unique training tokens of {len(text.SPLIT.other)} packages apart and 341 others: the Python "
        f"source of installed packages, and English from seven Debian packages, each document once, no package over {text.SHARE:.0%} of the bytes. No "
        f"experiment but the last reads it more than {text.EPOCHS:g} times. Two sides of {text.SPLIT.held_out:.0%} of the documents are held out: one to "
        "choose by, one to test on.",
        "- **Pairs.** Two models that are compared differ in what the claim is about. They start at one spread of half-lives "
        "(32 to 8,192 tokens), have one convolution, one gate, one layout, one number of parameters and, within 2 %, as many bytes of state.",
        f"- **Recall** is trained on rows of which {base.AFTER.sparse:g} ask for pairs at any distance, answers counted {base.AFTER.weight:g} times, "
        f"after a dense warm-up until a gate: {base.GATE.excess:g} nats over the best predictor, by step {base.BY} of {base.STEPS:,}. Runs that do not pass "
        "are not scored, and are counted.",
        f"- **Learning rates** are each family's, from {', '.join(f'{lr:g}' for lr in rates.GRID)}, chosen on the development side with seeds of their own.",
        "- **Verdicts.** A claim says that a difference is above its margin: *holds* and *opposite* have p < 0.05 for the distance to the margin, after "
        "Holm over the six. *Negligible*: the 95 % interval lies inside the margin. *Undecided*: neither. *No range*: all runs at chance, or at the "
        "ceiling. One look is taken at half of the seeds, with p < 0.001.",
        f"- **Experiments.** Pilot: {len(pilot.MIXERS)} mixers. Capacity: two layers, associative recall of {capacity.LOADS[0]} to {capacity.LOADS[-1]} pairs. Forks: "
        f"{forks.TRUNK} steps of trunk, {forks.BRANCH} of branch. Language: {language.STEPS:,} steps. Reach: the first study's recipe, seeds "
        f"{reach.SEEDS[0]} to {reach.SEEDS[-1]}.",
    )
)

LIMITS = "\n".join(
    (
        "- **Size.** Models have 18M parameters, those of reach 60M, those of capacity less than one million. Order at these sizes need not be order at 1B.",
        "- **Text.** Two thirds of it is Python source; the English is reference and argument, no stories and no conversation.",
        "- **Forks** say what an addition learns in a few hundred steps from a model without it, and not what a model trained with it from the start "
        "would be. CCQ's branch holds a state twice as large as its trunk's.",
        "- **The released Q-Delta** is computed in float32 PyTorch, as its partner is: no kernel of the authors was run.",
        "- **One recipe.** Learning rates are chosen for each family, all else is one recipe.",
    )
)

BEFORE = (
    "The [first study](../README.md) trained 21 mixers of 60M parameters with three seeds, and 11 of 125M with one. Eight of its nine claims are "
    "undecided, with intervals of ± 12 to ± 81 points. What it does support: LUCID's held-out loss −0.082 ± 0.028 nats against softmax; Polar's main effect + 42 ± 7 "
    "points at 8 × the training length, memory's + 27 ± 7."
)

PAGE = Study("The second study", PRIMARY, EXPLORED, ADVICE, ("capacity", capacity.CURVE), METHOD, LIMITS, BEFORE)
