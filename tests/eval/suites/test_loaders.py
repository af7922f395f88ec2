"""One test a data set: its fields and types are those of the real one, and lm-eval's task makes the prompt of its row that it should.

The prompts are written out, so that a field that is read wrongly is seen.
"""

import pytest

from needlework.eval.suites import SUITES
from needlework.eval.suites.harness import Harness

from .hub import DATA

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[ruler,longbench]>=0.4.13'")
pytestmark = pytest.mark.slow
ITEMS = {item.task: item for suite in SUITES.values() for item in suite.items}

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
