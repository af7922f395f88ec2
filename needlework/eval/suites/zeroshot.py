"""Zero-shot tasks, each paper's own, with its own metrics and its own mean. A length is the window: where a prompt is longer it is cut on
the left, and WikiText's word perplexity is taken in windows of it."""

from .harness import Harness
from .suite import Item, Mean, Suite

WINDOW = 2048  # lm-eval's, where a model's config names no limit; the same for every model, or WikiText could not be compared

FOLDERS = {
    "wikitext": "wikitext", "lambada_openai": "lambada", "piqa": "piqa", "hellaswag": "hellaswag", "winogrande": "winogrande",
    "arc_easy": "arc", "arc_challenge": "arc", "social_iqa": "siqa", "openbookqa": "openbookqa", "boolq": "super_glue/boolq",
    "copa": "super_glue/copa", "multirc": "super_glue/multirc", "record": "record", "wic": "super_glue/wic",
    "race_middle": "race_middle", "storycloze_2016": "storycloze",
}  # fmt: skip


def item(task: str, *metrics: str) -> Item:
    return Harness(task=task, metrics=metrics, folder=FOLDERS[task])


def suite(name: str, source: str, before: tuple[Item, ...], averaged: dict[str, str]) -> Suite:
    """A paper's table: what is in no mean, then the tasks of the mean and the metric of each."""
    shown = {one.task: one for one in before}
    items = before + tuple(item(task, metric) for task, metric in averaged.items() if task not in shown)
    mean = Mean(name=f"mean of {len(averaged)}", of=tuple(averaged.items()))
    return Suite(name=name, title="zero-shot tasks", source=source, items=items, lengths=(WINDOW,), means=(mean,))


LANGUAGE = (item("wikitext", "word_perplexity"), item("lambada_openai", "perplexity", "acc"))

CCQ = suite(
    "zeroshot-ccq", "CCQ, Table 2 and Appendix E", LANGUAGE,
    {"piqa": "acc", "hellaswag": "acc_norm", "winogrande": "acc", "arc_easy": "acc_norm", "arc_challenge": "acc_norm",
     "social_iqa": "acc", "boolq": "acc"},
)  # fmt: skip

CARVE = suite(
    "zeroshot-carve", "CARVE, Table 5", LANGUAGE,
    {"lambada_openai": "acc", "piqa": "acc", "hellaswag": "acc_norm", "winogrande": "acc", "arc_easy": "acc", "arc_challenge": "acc",
     "openbookqa": "acc", "social_iqa": "acc", "boolq": "acc"},
)  # fmt: skip

# ReCoRD's accuracy is its exact match; the paper does not say which year of StoryCloze: the one whose test answers are public
LUCID = suite(
    "zeroshot-lucid", "LUCID, Table 6", (),
    {"copa": "acc", "hellaswag": "acc", "multirc": "acc", "piqa": "acc", "race_middle": "acc", "record": "em", "storycloze_2016": "acc",
     "wic": "acc", "winogrande": "acc"},
)  # fmt: skip

# the paper names a mean of eight and no task of it: these are Gated DeltaNet's eight, whose code it trains with
QDELTA = suite(
    "zeroshot-qdelta", "Q-Delta; the eight tasks are ours", LANGUAGE,
    {"lambada_openai": "acc", "piqa": "acc", "hellaswag": "acc_norm", "winogrande": "acc", "arc_easy": "acc",
     "arc_challenge": "acc_norm", "social_iqa": "acc", "boolq": "acc"},
)  # fmt: skip
