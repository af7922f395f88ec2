"""The prompts of the recall suite and of ReCoRD, and how a document is cut: around the first answer, or from its end."""

import re

import pytest

from needlework.eval.suites import documents, record
from needlework.eval.suites.documents import Document, around, cloze, completion, contains, fitted, keyed

from .hub import DATA

ROWS = {data.path: data.splits["validation"] for data in DATA if data.path.startswith("hazyresearch/")}


def words(text, add_special_tokens=True, return_offsets_mapping=False):
    """A tokenizer whose tokens are words."""
    spans = [found.span() for found in re.finditer(r"\S+", text)]
    return {"input_ids": list(range(len(spans))), "offset_mapping": spans}


def test_a_key_is_asked_after_its_document_and_announced_before_it():
    found = keyed(ROWS["hazyresearch/based-swde-v2"][0])
    text = "The film was directed by Ada Byron in 1843."
    assert found == Document(text, "Director:", text, "Information about Director.", ["Ada Byron"])
    assert keyed(ROWS["hazyresearch/based-fda"][0]).document == "A device. Its director is Ada Byron."


def test_a_completion_is_split_where_its_context_ends():
    first, other = map(completion, ROWS["hazyresearch/based-squad"])
    assert first == Document(
        "Paris is in France.", "The capital of France is", "Paris is in France.", "What is the capital of France?", ["Paris"]
    )
    assert other == Document("", "Other words of a passage. It was", "A passage.", "Who?", ["Ada"])


def test_a_cloze_follows_its_context_once():
    found = cloze(ROWS["hazyresearch/based_triviaqa"][0])
    text = "Lyon  Lyon lies on the Rhone."
    assert found == Document(text, "The river of Lyon is the", text, "Which river?", ["Rhone", "RHONE"])
    row = ROWS["hazyresearch/based_nq_2048"][0]
    assert cloze(row).intro == "who was the first king" and cloze(row | {"answers": []}).answers == ["unanswerable"]


def test_a_long_document_keeps_what_is_around_the_first_answer():
    text = " ".join(f"w{i}" for i in range(100))
    assert around(text, ["w3"], words, 100) == text
    assert around(text, ["w50"], words, 10) == " ".join(f"w{i}" for i in range(45, 55))
    assert around(text, ["w70", "W50"], words, 10) == " ".join(f"w{i}" for i in range(45, 55)), (
        "the first in any case of letters"
    )
    assert around(text, ["w1"], words, 10) == " ".join(f"w{i}" for i in range(10))
    assert around(text, ["w98"], words, 10) == around(text, ["nowhere"], words, 10) == " ".join(f"w{i}" for i in range(90, 100))


def test_document_question_and_answer_fit_the_length():
    text = " ".join(f"w{i}" for i in range(100))
    cut = fitted(Document(text, "a question of five words", text, "an intro", ["w60"]), words, 80)
    assert len(cut.document.split()) == 80 - 50 - 5 - 2 and "w60" in cut.document and cut.first == cut.document


@pytest.mark.parametrize(("said", "right"), [(" by ada BYRON.", 1.0), ("by Ada", 0.0), ("", 0.0)])
def test_an_answer_is_right_if_it_stands_in_the_continuation(said, right):
    assert contains({"answers": ["Ada Byron", "the countess"]}, [said]) == {"contains": right}


def test_every_source_has_a_function_of_its_rows():
    for path, read in documents.SOURCES.values():
        for row in ROWS[path]:
            found = read(row)
            assert found.question and found.intro and found.first and found.answers


def test_records_passage_query_and_exact_match():
    (row,) = next(data.splits["validation"] for data in DATA if data.config == "record")
    assert record.text(row) == "Ada wrote.\n\n  - Ada Byron wrote a program.\n  - Charles built.\n"
    assert record.choices(row) == ["  - Charles wrote the first program", "  - Ada wrote the first program"]
    assert record.target(row) == "  - Ada wrote the first program"
    assert record.exact(row, [(-1.0, False), (-2.0, False)]) == {"em": 0.0}
    assert record.exact(row, [(-3.0, False), (-2.0, False)]) == {"em": 1.0}
    assert record.plain("The  Ada, of a tale!") == "ada of tale"
