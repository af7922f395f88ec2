"""Every suite end to end on made-up data sets of the true form, by lm-eval itself; RULER's tasks that need no data for real.

A prompt that a task makes of a data set's row is written out here, so that a field that is read wrongly is seen.
"""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from needlework.eval.suites import SUITES
from needlework.eval.suites.harness import Harness
from needlework.eval.suites.number import Unavailable
from needlework.experiment.suites import measure, subject_of

from .hub import DATA

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[ruler,longbench]>=0.4.13'")
pytestmark = pytest.mark.slow

# task -> the beginning or the end of its first prompt, and its first target, as lm-eval makes them of the rows in hub.py
PROMPTS = {
    "wikitext": ("", " = A title =\nThe first line, of nine words, is here.\n"),
    "lambada_openai": ("the cat sat on the", " mat"),
    "piqa": ("Question: open a jar\nAnswer:", 0),
    "hellaswag": ("Cooking: A man cuts bread. He", 0),
    "winogrande": (1, "was small."),
    "arc_easy": ("Question: What melts?\nAnswer:", 0),
    "arc_challenge": ("Question: What melts?\nAnswer:", 0),
    "openbookqa": ("The sun is", 0),
    "social_iqa": ("Q: Sam won. How does Sam feel?\nA:", 1),
    "boolq": ("Ice is cold.\nQuestion: is ice cold?\nAnswer:", 1),
    "copa": ("It rained therefore", " the street was wet."),
    "multirc": ("Tom ran.\nQuestion: Who ran?\nAnswer:", 1),
    "wic": ("Question: Is the word 'bank' used in the same way in the two sentences above?\nAnswer:", 0),
    "record": ("Ada wrote.\n\n  - Ada Byron wrote a program.\n  - Charles built.\n", "  - Ada wrote the first program"),
    "race_middle": ("Article: Tom has a red kite.\n\nQuestion: What colour is the kite?\nAnswer:", 1),
    "storycloze_2016": ("Sentence 1. Sentence 2. Sentence 3. Sentence 4.", 0),
    "recall_swde": ("The film was directed by Ada Byron in 1843. Director:", "Ada Byron"),
    "recall_fda_twice": ("Its director is Ada Byron.\nA device. Its director is Ada Byron. Director:", "Ada Byron"),
    "recall_squad": ("Paris is in France. The capital of France is", "Paris"),
    "recall_squad_twice": (
        "What is the capital of France? Paris is in France.\nParis is in France. The capital of France is",
        "Paris",
    ),
    "recall_triviaqa_twice": (
        "Which river? Lyon  Lyon lies on the Rhone.\nLyon  Lyon lies on the Rhone. The river of Lyon is the",
        "Rhone",
    ),
    "recall_nq": ("The first king was Alfred. The first king was", "Alfred"),
    "recall_drop": ("They scored 3 goals and 4 more. In all they scored", "7"),
    "longbench_narrativeqa": ("Question: Who wrote?\n\nAnswer:", ["Ada"]),
    "longbench_qasper": ("Question: Which method?\n\nAnswer:", ["unanswerable"]),
    "longbench_multifieldqa_en": ("Question: Where?\nAnswer:", ["Paris"]),
    "longbench_hotpotqa": ("Question: Who?\nAnswer:", ["Ada Byron"]),
    "longbench_2wikimqa": ("Question: When?\nAnswer:", ["1843"]),
    "longbench_musique": ("Question: What?\nAnswer:", ["a program"]),
    "longbench_gov_report": ("summary of the report.\n\nSummary:", ["The report is short."]),
    "longbench_qmsum": ("Query: What was decided?\nAnswer:", ["Nothing was."]),
    "longbench_multi_news": ("summary of all the news.\n\nSummary:", ["All news is old."]),
    "longbench_trec": ("Question: Who wrote?\nType:", ["Human"]),
    "longbench_triviaqa": ("Question: Which river?\nAnswer:", ["Rhone"]),
    "longbench_samsum": ("Dialogue: Hi.\nSummary:", ["They greet."]),
    "longbench_lcc": ("Next line of code:", ["    return x"]),
    "longbench_repobench-p": ("def f(x):\nNext line of code:", ["    return x"]),
    "babilong_qa1": ("Mary went to the garden. John took the ball.\nWhere is Mary?", "garden"),
    "babilong_qa20": ("Mary went to the garden. John took the ball.\nWhere is Mary?", "garden"),
    "infinitebench_passkey": ("The pass key is 71432.\n\nWhat is the pass key?", "71432"),
    "infinitebench_kv_retrieval": ('{"a": "b7"}\n\nKey: "a"', "b7"),
    "infinitebench_number_string": ("What is the sequence of digits?", "5566"),
    "infinitebench_code_run": (
        "the return value of func_1(3). Be concise. Your response must end with the final returned value.",
        "5",
    ),
    "infinitebench_code_debug": ("deliberate and obvious error in A, B, C, or D.", "f"),
    "infinitebench_math_find": ("[3, 1, 2]\n\nThe largest number of the list:", "3"),
    "infinitebench_longdialogue_qa_en": ("of one single character and nothing else.", "ADA"),
    "infinitebench_longbook_qa_en": ("Once Ada wrote.\n\nQuestion: Who wrote?\n\nBe very concise.", "Ada"),
    "infinitebench_longbook_sum_en": ("Once Ada wrote.", "Ada wrote once."),
    "infinitebench_longbook_choice_en": ("A. Ada\nB. Ben\nC. Cy\nD. Di", "Ada"),
    "infinitebench_longbook_qa_chn": ("从前有人。\n\n问题：谁？\n请尽量简短地回答。", "人"),
}
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


@pytest.fixture
def subject(checkpoint, mirror, offline, extras, small_text):
    from needlework.data import load_corpus

    return subject_of(str(checkpoint), lambda tokenizer: load_corpus(small_text, tokenizer), data=mirror, limit=2)


@pytest.mark.parametrize("data", [data for data in DATA if data.fields], ids=lambda data: f"{data.path} {data.config}")
def test_a_data_set_has_the_fields_and_types_of_the_real_one(data, mirror, offline):
    import datasets

    found = datasets.load_dataset(str(mirror / data.path), data.config)
    assert found.keys() == data.splits.keys()
    for split, rows in data.splits.items():
        assert found[split].column_names == list(data.fields) and len(found[split]) == len(rows)
        for name, kind in data.fields.items():
            feature = found[split].features[name]
            match kind:
                case str():
                    assert feature.dtype == kind
                case [inner]:
                    assert feature.feature.dtype == inner
                case tuple():
                    assert tuple(feature.names) == kind
                case _:
                    assert feature.keys() == kind.keys()


@pytest.mark.parametrize("task", PROMPTS)
def test_a_task_makes_the_prompt_of_its_data_sets_row(task, subject):
    item = ITEMS[task]
    loaded = item.load(task, subject, item.only[-1] if item.only else 2048)
    row, (prompt, target) = loaded.eval_docs[0], PROMPTS[task]
    made, wanted = loaded.doc_to_text(row), loaded.doc_to_target(row)
    assert made == prompt if prompt == "" or isinstance(prompt, int) else made.endswith(prompt)
    assert (int(wanted) if isinstance(target, int) else wanted) == target


def test_every_task_with_a_data_set_of_its_own_has_its_prompt_written_out():
    """RULER's texts are generated; tasks that share a loader have one of them written out."""
    shared = {f"babilong_qa{n}" for n in range(2, 20)} | {f"recall_{s}" for s in ("fda", "triviaqa")}
    shared |= {f"recall_{s}_twice" for s in ("swde", "nq", "drop")}
    read = {
        task
        for task, item in ITEMS.items()
        if isinstance(item, Harness) and not hasattr(item, "keys") and item.folder != "ruler"
    }
    assert read - shared == PROMPTS.keys()


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
    page = PROMPTS["wikitext"][1].encode()
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
    """The tasks that need no data: 500 samples of at most the length, whose answer stands in the text."""
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
