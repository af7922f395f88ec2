"""What each kind of task gives lm-eval and takes from its documents, without lm-eval."""

import logging
import math

import pytest

from needlework.eval.suites import SUITES
from needlework.eval.suites.harness import of_documents, warnings_of
from needlework.eval.suites.subject import Subject

ITEMS = {item.task: item for suite in SUITES.values() for item in suite.items}
SUBJECT = Subject(model=None, tokenizer=None, tokenizer_at="a/tokenizer", words=None, read=None, at_once=None, corpus=None)


def test_log_likelihoods_become_perplexities_and_shares_stay():
    assert of_documents("acc", [1, 0, 0, 1])["value"] == 0.5
    assert of_documents("perplexity", [-1.0, -3.0])["value"] == pytest.approx(math.exp(2))
    found = of_documents("word_perplexity", [(-6.0, 2), (-6.0, 10)])
    assert found["value"] == pytest.approx(math.e) and found["documents"] == [6.0, 6.0]


def test_a_ruler_task_is_loaded_at_one_length_with_the_models_tokenizer_and_reads_that_length():
    item = ITEMS["niah_single_2"]
    assert item.metadata(SUBJECT, 8192) == {"tokenizer": "a/tokenizer", "max_seq_lengths": [8192]}
    found = item.numbers([{"4096": -1.0, "8192": 1.0}, {"4096": -1.0, "8192": 0.5}], 8192)
    assert found == {"accuracy": {"value": 0.75, "documents": [1.0, 0.5]}}, (
        "the -1 of a length that was not asked is in no mean"
    )
    assert item.tokens(8192) > 8192 + 128, "the prefix of the answer is beyond the length"


def test_all_needles_are_a_share_and_an_exact_match():
    found = ITEMS["mniah_4_all"].numbers([{"2048": 1.0}, {"2048": 0.75}], 2048)
    assert found["share"]["value"] == 0.875 and found["exact"]["value"] == 0.5
    assert ITEMS["mniah_4"].numbers([{"2048": 1.0}, {"2048": 0.0}], 2048)["accuracy"]["value"] == 0.5


def test_babilongs_lengths_are_its_data_sets():
    assert [ITEMS["babilong_qa1"].metadata(SUBJECT, n) for n in (0, 1024, 131_072)] == [
        {"max_seq_lengths": "0k"}, {"max_seq_lengths": "1k"}, {"max_seq_lengths": "128k"},
    ]  # fmt: skip
    assert ITEMS["babilong_qa5"].only[-1] == 131_072 and ITEMS["babilong_qa6"].only == (0,)


def test_infinitebenchs_splits_and_types_are_put_right():
    changed = ITEMS["infinitebench_longbook_qa_en"].changes(0)
    assert (
        changed["test_split"] == "longbook_qa_eng" and changed["dataset_kwargs"]["features"]["answer"].feature.dtype == "string"
    )
    assert ITEMS["infinitebench_passkey"].changes(0)["test_split"] == "passkey"
    assert ITEMS["infinitebench_longbook_qa_chn"].changes(0)["test_split"] == "longbook_qa_chn"


def test_a_document_read_twice_has_twice_the_room():
    assert ITEMS["recall_fda"].tokens(2048) == 2048 and ITEMS["recall_fda_twice"].tokens(2048) == 4096


def test_warnings_of_cut_documents_are_counted_and_the_logger_is_as_before():
    logger = logging.getLogger("a.library")
    logger.setLevel(logging.ERROR)
    with warnings_of("a") as found:
        for n in (5, 17):
            logger.parent.getChild("part").warning(f"Left truncation of {n} tokens")
        logging.getLogger("a.part").warning("an argument is ignored")
    assert found == ["2 ×: Left truncation of N tokens"]
    above = logging.getLogger("a")
    assert not above.handlers and above.propagate and above.level == logging.NOTSET
