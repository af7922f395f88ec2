"""The documents of the recall suite: rows of the data sets of Based and Just Read Twice as document, question and answers, the document
cut so that prompt and answer have at most so many tokens.

    once     document question            twice    intro first ⏎ document question

where `first` is the document too, unless the data set has another form of it. A longer document keeps a stretch around the first place
where an answer is, as Just Read Twice's code cuts it; where none is in it, its end.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

ANSWER = 48 + 2  # new tokens, and what a tokenizer makes of the joints

Row = dict[str, Any]


class Document(NamedTuple):
    """One row. first: what is read first of two times; intro: what announces the question there."""

    document: str
    question: str
    first: str
    intro: str
    answers: list[str]


def keyed(row: Row) -> Document:
    """SWDE and FDA: the value of a key. SWDE's texts end with a heading and the key, which the question repeats."""
    text, key = row["text"].split("Summary of information above...")[0], row["key"]
    named, document = key[0].upper() + key[1:], _sentence(_before(text, f"{key}:"))
    return Document(document, f"{named}:", document, f"Information about {named}.", [row["value"].strip()])


def completion(row: Row) -> Document:
    """SQuAD: `text` is the context, as a rule in the words of `context`, and the beginning of a sentence that the answer ends."""
    context, text = row["context"].split("Question:")[0].strip(), row["text"].strip()
    document = context if text.startswith(context) else ""
    return Document(document, text[len(document) :].strip(), context, row["question"].strip(), [row["value"].strip()])


def cloze(row: Row) -> Document:
    """TriviaQA, NQ and DROP: `question` is the beginning of a sentence, `orig_question` the question that it was."""
    text = re.sub(r"\[(PAR|DOC|TLE)\]", "", row["context"])
    question = row["question"].strip()
    document = _sentence(_before(text, question))
    return Document(document, question, document, row["orig_question"].strip(":"), list(row["answers"]) or ["unanswerable"])


class Source(NamedTuple):
    """A data set of the Hub and how its rows are read."""

    path: str
    read: Callable[[Row], Document]


SOURCES = {
    "swde": Source("hazyresearch/based-swde-v2", keyed),
    "fda": Source("hazyresearch/based-fda", keyed),
    "squad": Source("hazyresearch/based-squad", completion),
    "triviaqa": Source("hazyresearch/based_triviaqa", cloze),
    "nq": Source("hazyresearch/based_nq_2048", cloze),
    "drop": Source("hazyresearch/based_drop", cloze),
}


def load(*, source: str, tokenizer: str, max_seq_lengths: list[int], **_: Any) -> dict[str, Any]:
    """{"validation": the documents of a source}, cut to max_seq_lengths[0] tokens of the tokenizer with question and answer."""
    from datasets import Dataset, load_dataset

    from needlework.models.tokenizer import load_tokenizer

    path, read = SOURCES[source]
    words = load_tokenizer(tokenizer)
    (length,) = max_seq_lengths
    rows = [fitted(read(row), words, length) for row in load_dataset(path, split="validation").to_list()]
    return {"validation": Dataset.from_list([row._asdict() for row in rows])}


def fitted(row: Document, tokenizer: Any, length: int) -> Document:
    """The row with its document cut, so that each reading of it with the question and the answer has at most `length` tokens."""
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    most = max(1, length - ANSWER - count(row.question) - count(row.intro))
    document, first = (around(text, row.answers, tokenizer, most) for text in (row.document, row.first))
    return row._replace(document=document, first=first)


def around(text: str, answers: list[str], tokenizer: Any, most: int) -> str:
    """At most `most` tokens of the text: half of them before the first answer in it, or as near to that as the text's ends allow."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(spans) <= most:
        return text
    places = [found.start() for answer in answers if answer and (found := re.search(re.escape(answer), text, re.IGNORECASE))]
    middle = next((i for i, (_, end) in enumerate(spans) if end > min(places)), 0) if places else len(spans)
    first = min(max(0, middle - most // 2), len(spans) - most)
    return text[spans[first][0] : spans[first + most - 1][1]]


def contains(doc: Row, results: list[str]) -> dict[str, float]:
    """Whether the continuation has one of the answers in it, in any case."""
    return {"contains": float(any(answer.lower() in results[0].lower() for answer in doc["answers"]))}


def _before(text: str, question: str) -> str:
    """A text without the question at its end, however often."""
    text = text.strip()
    while question and text.lower().endswith(question.lower()):
        text = text[: -len(question)].strip()
    return text


def _sentence(text: str) -> str:
    return text.strip().strip(".").strip() + "."
