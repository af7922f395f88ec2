"""What the comparison claims, shows and cannot say: data of its page. All but `EFFECTS` and `VOID` was fixed before the runs."""

from needlework.report.asked import Measure
from needlework.report.claims import Claim
from needlework.report.effects import Effect
from needlework.report.sweep import Void, found

_COMPACT = ("needle", "needles-2", "needles", "needles-8")
_AT_AND_PAST = (1.0, 2.0, 4.0, 8.0)
HEADLINES = (
    Claim(
        "CCQ on Gated DeltaNet finds more than Gated DeltaNet", "ccq-gated-deltanet", "gated-deltanet", _COMPACT, _AT_AND_PAST
    ),
    Claim("CCQ on GLA finds more than GLA", "ccq-gla", "gla", _COMPACT, _AT_AND_PAST),
    Claim("LUCID finds more of many needles than softmax", "lucid", "softmax", ("needles", "needles-8"), (1.0,)),
    Claim(
        "Q-Delta finds more numbers and uuids than Gated DeltaNet", "qdelta", "gated-deltanet", ("number", "uuid"), (1.0, 2.0)
    ),
    Claim("CARVE finds more than CARVE blind", "carve", "carve-blind", _COMPACT, _AT_AND_PAST),
    Claim(
        "Polar + memory finds more at 32× than softmax + memory",
        "polar-memory",
        "nope-memory",
        ("needle", "induction"),
        (32.0,),
    ),
)
CLAIMS = (
    *HEADLINES,
    Claim("Q-Delta finds more than Q-Delta as released", "qdelta", "qdelta-transposed", _COMPACT, _AT_AND_PAST),
    Claim(
        "Q-Delta·CCQ with LUCID finds more than Gated DeltaNet", "qdelta-ccq-lucid", "gated-deltanet", _COMPACT, _AT_AND_PAST
    ),
    Claim("KDA with Polar + memory finds more than KDA", "kda-polar", "kda", _COMPACT, _AT_AND_PAST),
)

_LOSS = Measure(lambda run: run["loss"][str(run["train_length"])], "nats a token", lower=True)
_FAR = Measure(lambda run: found(run, run["tasks"], [8 * run["train_length"]]), "points", times=100)
EFFECTS = (
    Effect("LUCID: held-out loss at the training length", ("lucid",), ("softmax",), _LOSS),
    Effect("Polar: found at 8×, all tasks", ("polar", "polar-memory"), ("nope", "nope-memory"), _FAR),
    Effect("Memory: found at 8×, all tasks", ("nope-memory", "polar-memory"), ("nope", "polar"), _FAR),
)

# whom the one picture for everybody shows: each paper's, two baselines, and the composition
GLANCE = ("softmax", "gated-deltanet", "qdelta", "carve", "ccq-gated-deltanet", "lucid", "polar-memory", "qdelta-ccq-lucid")

# the panels of the page, and the mixers that each compares
FAMILIES = {
    "Softmax": ("softmax", "nope", "window", "differential"),
    "Recurrent": ("gla", "gated-deltanet", "kda"),
    "Q-Delta": ("gated-deltanet", "qdelta", "qdelta-transposed"),
    "CARVE": ("kda", "carve", "carve-blind"),
    "CCQ": ("gla", "ccq-gla", "gated-deltanet", "ccq-gated-deltanet", "qdelta", "ccq-qdelta"),
    "LUCID": ("softmax", "lucid", "lucid-nope"),
    "ATMA": ("nope", "nope-memory", "polar", "polar-memory"),
    "Ours": ("gated-deltanet", "softmax", "qdelta-ccq-lucid", "kda-polar"),
}

# runs of code from before a mend, by the first digits of their commits: left off the page until they are run again
VOID = {
    "carve-blind": Void(
        "measured with weights that were never set: w1 and w2 of rank 0 were left empty when the checkpoint was read back, so every "
        "number but those of training is of another model than was trained",
        ("84d63a5f4e", "d6b12d1c9b", "1dd679fd9b", "1de33d4033"),
    ),
}

# each paper's models as published: parameters, training tokens (LUCID: both of its phases)
PAPERS = {
    "ATMA": (378_220_864, 1e9),
    "Q-Delta 340M": (380_017_148, 15e9),
    "LUCID": (1_113_024_512, 11_000 * 524_288 + 500 * 1_048_576),
    "CCQ 500M": (479_633_274, 15e9),
    "Q-Delta 1.3B": (1_387_606_780, 30e9),
    "CCQ 1.3B": (1_322_070_906, 40e9),
    "CARVE 1.3B": (1_325_011_968, 100e9),
}


def _times(parameters: float, tokens: float, compute: float) -> str:
    """Compute, 6 · parameters · tokens, in multiples of a 60M run's: two digits."""
    return f"{float(f'{parameters * tokens / compute:.2g}'):,.0f}"


def limits(compute: float) -> str:
    """What the comparison cannot say. compute: parameters · tokens of a 60M run."""
    return "\n".join(
        (
            "- **Names.** CARVE, blind, has no feedback of its outputs in its gate. Q-Delta as released has the coupling of its authors' kernels, "
            "which is not that of its equation.",
            "- **Compute.** The papers' models had more compute (6 · parameters · tokens) than one of ours at 60M by a factor of "
            f"{', '.join(f'{_times(*of, compute)} ({name})' for name, of in PAPERS.items())}; than one at 125M by half of that.",
            "- **Text.** The papers' models read another kind of text than Python source. Half of the rows of our first 200 steps, and a tenth "
            "after that, are nothing but needles.",
            "- **Tasks.** The models are trained on needles of the compact form (`#@xy=7391`). They are not trained on the sentences of passkey, "
            "number, uuid and multikey, nor on the induction needle: those show what a model this small learns to copy by itself.",
            "- **Around the mixer** is what its paper has there. Softmax with RoPE, Diff Transformer and LUCID have no convolution, no norms of q and "
            "k and no output gate; softmax without positions, Polar and those with memory have them all, as in ATMA. A difference between the two "
            "groups is of all this.",
            "- **Tuning.** Learning rate and schedule were chosen on softmax and Gated DeltaNet and used for all, which favours those two.",
            "- **Seeds.** With so few seeds a difference of a few points counts only where each of them has it.",
            "- **Initialisation.** Gates, memories and norms start as published: with half-lives of a few dozen tokens in most heads of Gated "
            "DeltaNet and of ATMA's memory. Longer training moves them further.",
            "- **Bytes of state** are those of serving: what grows in bfloat16, what is fixed in float32.",
            "- **Tokens per second** are of this code on the GPU named above. Two of CARVE blind's three runs shared their GPUs with each other, "
            "so its mean rate is below what one run alone has.",
        )
    )
