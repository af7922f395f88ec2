"""Every suite end to end on made-up data sets of the true form, by lm-eval itself; RULER's tasks that need no data for real."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from needlework.eval.suites import SUITES
from needlework.eval.suites.number import Unavailable
from needlework.experiment.suites import measure, subject_of

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[ruler,longbench]>=0.4.13'")
pytestmark = pytest.mark.slow

LENGTHS = {
    "ruler": (1024,),
    "mniah": (2048,),
    "babilong": (1024,),
    "longbench": (2048,),
    "infinitebench": (2048,),
    "perplexity": (64,),
}
LENGTHS |= {"induction": (64, 128)}
ITEMS = {item.task: item for suite in SUITES.values() for item in suite.items}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_runs_from_end_to_end_on_fixtures(name, checkpoint, subject, tmp_path):
    path, result = measure(SUITES[name], str(checkpoint), subject, tmp_path, LENGTHS.get(name, ()))
    assert result["fixture"] is (name != "induction") and json.loads(path.read_text()) == result
    skipped = {cell: why["skipped"] for cell, why in result["cells"].items() if "skipped" in why}
    if name == "ruler":  # a byte is a token here, and its questions are fetched from elsewhere
        assert skipped.keys() == {f"ruler_{task}@1024" for task in ("vt", "cwe", "qa_squad", "qa_hotpot")}
        assert "tries for ever" in skipped["ruler_vt@1024"] and "tries for ever" in skipped["ruler_cwe@1024"]
        assert result["means"]["mean of 13@1024"]["value"] is None and result["means"]["S-NIAH@1024"]["value"] is not None
    else:
        assert not skipped
        assert all(mean["value"] is not None and not mean["missing"] for mean in result["means"].values())
    for cell, measured in result["cells"].items():
        for number in measured.get("metrics", {}).values():
            assert math.isfinite(number["value"]) and 1 <= len(number["documents"]) <= 4, cell
        if "lm_eval" in measured:
            found = measured["lm_eval"]
            assert {"config", "results", "configs", "versions", "n-shot", "higher_is_better", "n-samples"} <= found.keys()
            (of_task,) = found["results"].values()
            for metric, number in measured["metrics"].items():  # what we make of the documents is what lm-eval makes of them
                theirs = of_task.get(f"{metric},none", of_task.get(f"{cell.rpartition('@')[2]},none"))
                assert metric == "exact" or number["value"] == pytest.approx(theirs), cell


def test_the_numbers_are_the_models_own(checkpoint, subject):
    """LAMBADA's perplexity and accuracy, and WikiText's perplexity in windows, from the model's logits."""
    model = subject.model

    def nats(before, text):
        ids = torch.tensor([[*before, *text]])
        with torch.no_grad():
            scores = model(ids).logits[0, len(before) - 1 : -1].log_softmax(-1)
        return -scores.gather(1, ids[0, len(before) :, None]).double().sum().item()

    cell = ITEMS["lambada_openai"].measure(subject, 2048)
    words = [("the cat sat on the", " mat"), ("one and", " two")]
    expected = [nats(before.encode(), word.encode()) for before, word in words]
    assert cell["metrics"]["perplexity"]["documents"] == pytest.approx(expected, rel=1e-5)
    assert cell["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(sum(expected) / 2), rel=1e-4)
    page = b" = A title =\nThe first line, of nine words, is here.\n"
    (first, _) = ITEMS["wikitext"].measure(subject, 16)["metrics"]["word_perplexity"]["documents"]
    windows = [page[i : i + 16] for i in range(0, len(page), 16)]
    assert len(page) % 16, "the last window is filled from before"
    last = windows[-1]
    context = page[-17 : -len(last)]
    total = sum(nats([256] if i == 0 else page[16 * i - 1 : 16 * i], window) for i, window in enumerate(windows[:-1]))
    assert first == pytest.approx(total + nats(context, last), rel=1e-5)


def test_a_longer_prompt_than_the_window_is_named(subject):
    cell = ITEMS["longbench_hotpotqa"].measure(subject, 64)
    assert any("truncat" in warning.lower() for warning in cell["warnings"])
    with pytest.raises(Unavailable, match="it writes 512 tokens, and 64 are all that is read and written"):
        ITEMS["longbench_gov_report"].measure(subject, 64)


def test_rulers_needle_is_where_it_says_and_lengths_are_kept(subject):
    """The tasks that need no data: 500 samples of at most the length, whose answer is in the text."""
    for task in ("niah_single_1", "niah_multikey_2", "niah_multikey_3"):
        loaded = ITEMS[task].load(task, subject, 1024)
        rows = loaded.eval_docs
        assert len(rows) == 500 and {row["max_length"] for row in rows} == {1024}
        for row in rows.select(range(40)):
            assert all(answer in row["input"] for answer in row["outputs"]) and len(row["input"]) + 128 == row["length"] <= 1024
        assert sum(row["length"] for row in rows) / 500 > 0.5 * 1024


QUESTION = {"id": "q", "question": "Who wrote?", "is_impossible": False, "answers": [{"text": "Ada", "answer_start": 0}]}
SQUAD = {"data": [{"paragraphs": [{"context": f"Ada wrote page {i}.", "qas": [QUESTION]} for i in range(600)]}]}
HOTPOT = [{"question": "Who?", "answer": "Ada", "context": [["Ada", [f"Ada wrote {i}.", " So."]]]} for i in range(600)]


@pytest.mark.parametrize("task", ["ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot"])
def test_rulers_other_tasks_are_made_where_a_word_is_a_token(task, subject, tmp_path, monkeypatch):
    """A byte is too small a token for two of them; two fetch their questions, which are stand-ins of the true form here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0, "the": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    fast.save_pretrained(tmp_path)
    fetched = SimpleNamespace(raise_for_status=lambda: None, json=lambda: SQUAD if task.endswith("squad") else HOTPOT)
    monkeypatch.setattr("requests.get", lambda url, timeout: fetched)
    rows = ITEMS[task].load(task, replace(subject, tokenizer=fast, tokenizer_at=str(tmp_path)), 1024).eval_docs
    assert len(rows) == 500 and {row["max_length"] for row in rows} == {1024}
    for row in rows.select(range(20)):
        assert 500 < row["length"] <= 1024 + 50 * (task == "ruler_fwe") and row["outputs"] and row["gen_prefix"]
        assert any(answer in row["input"] for answer in row["outputs"])


def test_n_needles_are_asked_one_or_all(subject):
    for task, keys, asked in (("mniah_4", 4, 1), ("mniah_4_all", 4, 4)):
        rows = ITEMS[task].load("niah_multikey_1", subject, 2048).eval_docs.select(range(20))
        for row in rows:
            assert row["input"].count("One of the special magic numbers for") == keys and len(row["outputs"]) == asked
    documents = [{"2048": 1.0}, {"2048": 0.5}]
    assert ITEMS["mniah_4_all"].numbers(documents, 2048)["share"]["value"] == 0.75
    assert ITEMS["mniah_4_all"].numbers(documents, 2048)["exact"]["value"] == 0.5


def test_a_task_whose_data_is_nowhere_is_skipped_and_its_mean_is_not_given(checkpoint, offline, extras, tmp_path):
    from lm_eval.tasks.ruler.prepare_niah import get_haystack

    get_haystack.cache_clear()  # of the mirror's essays
    alone = subject_of(str(checkpoint), lambda tokenizer: None, limit=2)
    said = []
    _, result = measure(
        SUITES["ruler"],
        str(checkpoint),
        alone,
        tmp_path,
        (1024,),
        ("niah_single_1", "niah_single_2", "niah_single_3"),
        say=said.append,
    )
    assert "metrics" in result["cells"]["niah_single_1@1024"], "it needs no data"
    assert (
        "ConnectionError: Couldn't reach 'baber/paul_graham_essays' on the Hub"
        in result["cells"]["niah_single_2@1024"]["skipped"]
    )
    assert result["means"]["S-NIAH@1024"] == {
        "value": None,
        "missing": ["niah_single_2@1024", "niah_single_3@1024"],
        "of": result["means"]["S-NIAH@1024"]["of"],
    }
    assert result["fixture"] is False and any(line.startswith("niah_single_2@1024 is skipped: ") for line in said)


def test_a_suite_of_which_nothing_can_be_had_leaves_the_others(checkpoint, offline, needlework, tmp_path):
    asked = ("--suite", "zeroshot-qdelta", "--suite", "induction", "--length", 64, "--limit", 1, "--to", tmp_path)
    said = needlework("eval", checkpoint, *asked, ok=False)
    assert (
        "needlework: suite zeroshot-qdelta: none of its tasks could be measured: ConnectionError: Couldn't reach 'EleutherAI/wik"
        in said
    )
    assert [path.name.split(".")[-2] for path in tmp_path.glob("*.*.json")] == ["induction"]


@pytest.mark.parametrize("other", ["llama", "gpt2"])
def test_a_model_of_transformers_is_measured_by_the_same_command(other, others, mirror, offline, extras, needlework, tmp_path):
    asked = ["eval", others / other, "--data", mirror, "--to", tmp_path, "--limit", 1, "--suite", "zeroshot-ccq"]
    needlework(*asked, "--task", "piqa", "--task", "boolq", "--length", 64)
    if other == "gpt2":
        said = needlework(
            "eval", others / other, "--to", tmp_path / "long", *asked[2:4], *asked[-2:], "--task", "piqa", ok=False
        )
        assert "the model has 64 positions, and this takes 2,048; see --length" in said
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert result["checkpoint"]["model_type"] == other and result["fixture"] and result["limit"] == 1
    assert result["cells"].keys() == {"piqa@64", "boolq@64"} and all("metrics" in cell for cell in result["cells"].values())
    assert result["means"]["mean of 7@64"]["value"] is None
    needlework("report", tmp_path)
    assert f"/{other}** (FIXTURE, first 1 documents) |" in (tmp_path / "evaluation.md").read_text()
