"""Several needles with a key each (LUCID's MNIAH): RULER's niah_multikey_1 with n keys.

`mniah_n` asks for one of them, as LUCID's published code does. `mniah_n_all` asks for all n in one question: `share` is the share of
the values found, `exact` that of the questions of which all are.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from .number import Number, number
from .ruler import Ruler
from .suite import Suite

COUNTS = (2, 4, 6, 8, 10)


@dataclass(frozen=True, kw_only=True)
class Needles(Ruler):
    """niah_multikey_1 with `keys` keys, of which `asked` are asked."""

    keys: int
    asked: int
    name: str = "niah_multikey_1"

    def changes(self, length: int) -> dict[str, Any]:
        return {"custom_dataset": partial(samples, keys=self.keys, asked=self.asked)}

    def numbers(self, documents: list[dict[str, Any]], length: int) -> dict[str, Number]:
        shares = [document[str(length)] for document in documents]
        if self.asked == 1:
            return {"accuracy": number(shares)}
        return {"share": number(shares), "exact": number([float(share == 1) for share in shares])}


def samples(*, keys: int, asked: int, max_seq_lengths: list[int], tokenizer: str, **_: Any) -> dict[str, Any]:
    """The task's data set, by RULER's own generator: {"test": 500 documents at each length}."""
    from lm_eval.tasks.ruler.common_utils import get_tokenizer
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE, download_dataset
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    return download_dataset(
        generate_samples(
            get_haystack(type_haystack="essay"), max_seq_length=length, template=TEMPLATE, type_haystack="essay", type_needle_k="words",
            type_needle_v="numbers", num_needle_k=keys, num_needle_q=asked, TOKENIZER=get_tokenizer(tokenizer),
        )
        for length in max_seq_lengths
    )  # fmt: skip


MNIAH = Suite(
    name="mniah", title="one or all of n needles", source="LUCID, Tables 2 to 5; all asked is ours",
    items=(
        *(Needles(task=f"mniah_{n}", keys=n, asked=1) for n in COUNTS),
        *(Needles(task=f"mniah_{n}_all", keys=n, asked=n, metrics=("share", "exact")) for n in COUNTS),
    ),
    lengths=(2048,), length_is="tokens of the task", needs=("lm_eval", "nltk", "wonderwords"),
)  # fmt: skip
