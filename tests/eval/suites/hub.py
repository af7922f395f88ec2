"""A mirror of the Hub with a few made-up rows of every data set that a suite reads: paths, configs, splits, fields and types are those of
the real ones, as the YAML and the code of lm-eval's tasks ask for them."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Data(NamedTuple):
    """One config of a data set. fields: name -> dtype, [dtype] for a list, {name: …} for a struct, ("a", "b") for class labels."""

    path: str
    config: str
    fields: dict[str, Any]
    splits: dict[str, list[dict[str, Any]]]


def keyed(path: str, text: str) -> Data:
    fields = dict.fromkeys(("doc_id", "file_name", "key", "value", "text"), "string")
    row = {"doc_id": "0", "file_name": "0.htm", "key": "director", "value": "Ada Byron", "text": text}
    return Data(path, "default", fields, {"validation": [row, row | {"doc_id": "1", "value": "1843"}]})


def cloze(path: str, context: str, question: str, asked: str, answer: str) -> Data:
    fields = {"doc_id": "string", "context": "string", "question": "string", "orig_question": "string", "answers": ["string"]}
    row = {"doc_id": "0", "context": context, "question": question, "orig_question": asked, "answers": [answer, answer.upper()]}
    return Data(path, "default", fields, {"validation": [row, row | {"doc_id": "1", "answers": ["nothing of it"]}]})


def glue(config: str, fields: dict[str, Any], *rows: dict[str, Any]) -> Data:
    """A task of SuperGLUE."""
    return Data(
        "aps/super_glue",
        config,
        fields | {"label": ("no", "yes")} if "answers" not in fields else fields,
        {"train": list(rows), "validation": list(rows)},
    )


def choices(config: str) -> Data:
    fields = {"id": "string", "question": "string", "choices": {"text": ["string"], "label": ["string"]}, "answerKey": "string"}
    row = {
        "id": "a",
        "question": "What melts?",
        "choices": {"text": ["ice", "iron wool", "sand", "coal"], "label": list("ABCD")},
        "answerKey": "A",
    }
    other = row | {"id": "b", "choices": {"text": ["ice", "a stone", "sand"], "label": list("123")}, "answerKey": "2"}
    return Data("allenai/ai2_arc", config, fields, {key: [row, other] for key in ("train", "validation", "test")})


def longbench(config: str, question: str, answer: str, classes: list[str] | None = None) -> Data:
    fields = {"question": "string", "context": "string", "answers": ["string"], "length": "int32", "dataset": "string", "language": "string",
              "all_classes": ["string"], "_id": "string"}  # fmt: skip
    row = {"question": question, "context": f"A text for {config} that says {answer}. " * 4, "answers": [answer], "length": 40,
           "dataset": config, "language": "en", "all_classes": classes, "_id": config}  # fmt: skip
    return Data("Xnhyacinth/LongBench", config, fields, {"test": [row, row | {"context": f"Another text for {config}. " * 5}]})


def babilong(config: str, tasks: int) -> Data:
    row = {"input": "Mary went to the garden. John took the ball.", "question": "Where is Mary?", "target": "garden"}
    splits = {f"qa{n}": [row, row | {"target": "nowhere"}] for n in range(1, tasks + 1)}
    return Data("RMT-team/babilong-1k-samples", config, dict.fromkeys(("input", "target", "question"), "string"), splits)


INFINITE = {
    "passkey": ("The pass key is 71432.", "What is the pass key?", ["71432"], []),
    "kv_retrieval": ('{"a": "b7"}', 'Key: "a"', ["b7"], []),
    "number_string": ("The sequence of digits is 5566.", "What is the sequence of digits?", ["5566"], []),
    "code_run": ("def func_1(x): return x + 2", "Please give me the exact number of the return value of func_1(3).", ["5"], []),
    "code_debug": ("def f(): pass", "Which function?", ["f"], ["f", "g", "h", "i"]),
    "math_find": ("[3, 1, 2]", "The largest number of the list:", ["3"], []),
    "longdialogue_qa_eng": ("$$MASK$$: Hello.", "Who is $$MASK$$?", ["ADA"], []),
    "longbook_qa_eng": ("Once Ada wrote.", "Who wrote?", ["Ada"], []),
    "longbook_sum_eng": ("Once Ada wrote.", "Summarise.", ["Ada wrote once."], []),
    "longbook_choice_eng": ("Once Ada wrote.", "Who wrote?", ["Ada"], ["Ada", "Ben", "Cy", "Di"]),
    "longbook_qa_chn": ("从前有人。", "谁？", ["人"], []),
}
RACE = {
    "article": "Tom has a red kite.",
    "answer": "B",
    "question": "What colour is the kite?",
    "options": ["blue", "red", "green", "white"],
}
CLOZE = {f"input_sentence_{n}": f"Sentence {n}." for n in range(1, 5)}
WIKI = {"page": " = A title = \n The first line , of nine words , is here . \n"}
PASSAGE = "Ada wrote.\n@highlight\nAda Byron wrote a program\n@highlight\nCharles built"
SPAN = {"number": "3", "date": {"day": "", "month": "", "year": ""}, "spans": []}

DATA = [
    Data("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", {"page": "string"}, {key: [WIKI, {"page": "Two words"}] for key in ("train", "validation", "test")}),
    Data("EleutherAI/lambada_openai", "default", {"text": "string"}, {"test": [{"text": "the cat sat on the mat"}, {"text": "one and two"}]}),
    Data("baber/piqa", "default", {"goal": "string", "sol1": "string", "sol2": "string", "label": ("0", "1")},
         {key: [{"goal": "open a jar", "sol1": "twist the lid", "sol2": "sing", "label": 0}, {"goal": "cut", "sol1": "x", "sol2": "use a knife", "label": 1}] for key in ("train", "validation")}),
    Data("Rowan/hellaswag", "default",
         {"ind": "int32", "activity_label": "string", "ctx_a": "string", "ctx_b": "string", "ctx": "string", "endings": ["string"], "source_id": "string", "split": "string", "split_type": "string", "label": "string"},
         {key: [{"ind": 4, "activity_label": "Cooking", "ctx_a": "A man cuts bread.", "ctx_b": "he", "ctx": "A man cuts bread. he", "endings": ["eats it. [title] Done", "flies.", "is a fish.", "x"], "source_id": "a", "split": "val", "split_type": "indomain", "label": "0"}] for key in ("train", "validation")}),
    Data("allenai/winogrande", "winogrande_xl", {"sentence": "string", "option1": "string", "option2": "string", "answer": "string"},
         {key: [{"sentence": "The cup did not fit the box because the _ was small.", "option1": "cup", "option2": "box", "answer": "2"}] for key in ("train", "validation")}),
    choices("ARC-Easy"),
    choices("ARC-Challenge"),
    Data("allenai/openbookqa", "main", {"id": "string", "question_stem": "string", "choices": {"text": ["string"], "label": ["string"]}, "answerKey": "string"},
         {key: [{"id": "q", "question_stem": "The sun is", "choices": {"text": ["a star", "a cat", "ice", "wood"], "label": list("ABCD")}, "answerKey": "A"}] for key in ("train", "validation", "test")}),
    Data("lighteval/siqa", "default", dict.fromkeys(("context", "question", "answerA", "answerB", "answerC", "label"), "string"),
         {key: [{"context": "Sam won.", "question": "How does Sam feel?", "answerA": "sad", "answerB": "glad", "answerC": "old", "label": "2"}] for key in ("train", "validation")}),
    glue("boolq", {"question": "string", "passage": "string", "idx": "int32"}, {"question": "is ice cold", "passage": "Ice is cold.", "idx": 0, "label": 1}),
    glue("copa", {"premise": "string", "choice1": "string", "choice2": "string", "question": "string", "idx": "int32"},
         {"premise": "It rained.", "choice1": "The street was wet.", "choice2": "The street was dry.", "question": "effect", "idx": 0, "label": 0}),
    glue("multirc", {"paragraph": "string", "question": "string", "answer": "string", "idx": {"paragraph": "int32", "question": "int32", "answer": "int32"}},
         {"paragraph": "Tom ran.", "question": "Who ran?", "answer": "Tom", "idx": {"paragraph": 0, "question": 0, "answer": 0}, "label": 1}),
    glue("wic", {"word": "string", "sentence1": "string", "sentence2": "string", "start1": "int32", "start2": "int32", "end1": "int32", "end2": "int32", "idx": "int32"},
         {"word": "bank", "sentence1": "the bank of a river", "sentence2": "a bank with money", "start1": 4, "start2": 2, "end1": 8, "end2": 6, "idx": 0, "label": 0}),
    glue("record", {"passage": "string", "query": "string", "entities": ["string"], "answers": ["string"], "idx": {"passage": "int32", "query": "int32"}},
         {"passage": PASSAGE, "query": "@placeholder wrote the first program", "entities": ["Charles", "Ada"], "answers": ["Ada"], "idx": {"passage": 0, "query": 0}}),
    Data("ehovy/race", "middle", {"example_id": "string", "article": "string", "answer": "string", "question": "string", "options": ["string"]},
         {key: [{"example_id": "middle1.txt"} | RACE] for key in ("train", "validation", "test")}),
    Data("LSDSem/story_cloze", "2016", {"story_id": "string"} | dict.fromkeys((*CLOZE, "sentence_quiz1", "sentence_quiz2"), "string") | {"answer_right_ending": "int32"},
         {key: [{"story_id": "s"} | CLOZE | {"sentence_quiz1": "A good end.", "sentence_quiz2": "Bread.", "answer_right_ending": 1}] for key in ("validation", "test")}),
    Data("baber/paul_graham_essays", "default", {"title": "string", "text": "string"}, {"train": [{"title": "On haystacks", "text": "A haystack is large. Most of it is hay.\nOne looks for long. " * 900}]}),
    keyed("hazyresearch/based-swde-v2", "The film was directed by Ada Byron in 1843 .\nSummary of information above...\ndirector:"),
    keyed("hazyresearch/based-fda", "A device. Its director is Ada Byron. director:"),
    Data("hazyresearch/based-squad", "default", dict.fromkeys(("id", "title", "context", "question", "text", "value"), "string"),
         {"validation": [{"id": "0", "title": "t", "context": "Paris is in France.", "question": "What is the capital of France?", "text": "Paris is in France. The capital of France is", "value": "Paris"},
                         {"id": "1", "title": "t", "context": "A passage.", "question": "Who?", "text": "Other words of a passage. It was", "value": "Ada"}]}),
    cloze("hazyresearch/based_triviaqa", "[DOC] [TLE] Lyon [PAR] Lyon lies on the Rhone. The river of Lyon is the", "The river of Lyon is the", "Which river?", "Rhone"),
    cloze("hazyresearch/based_nq_2048", "The first king was Alfred.", "The first king was", "who was the first king:", "Alfred"),
    cloze("hazyresearch/based_drop", "They scored 3 goals and 4 more.", "In all they scored", "How many did they score?", "7"),
    longbench("narrativeqa", "Who wrote?", "Ada"),
    longbench("qasper", "Which method?", "unanswerable"),
    longbench("multifieldqa_en", "Where?", "Paris"),
    longbench("hotpotqa", "Who?", "Ada Byron"),
    longbench("2wikimqa", "When?", "1843"),
    longbench("musique", "What?", "a program"),
    longbench("gov_report", "", "The report is short."),
    longbench("qmsum", "What was decided?", "Nothing was."),
    longbench("multi_news", "", "All news is old."),
    longbench("trec", "Question: Who wrote?\nType:", "Human", ["Human", "Number", "Place"]),
    longbench("triviaqa", "Question: Which river?\nAnswer:", "Rhone"),
    longbench("samsum", "Dialogue: Hi.\nSummary:", "They greet."),
    longbench("lcc", "", "    return x"),
    longbench("repobench-p", "def f(x):\n", "    return x"),
    babilong("0k", 20),
    *(babilong(f"{1 << n}k", 5) for n in range(8)),
    Data("xinrongzhang2022/InfiniteBench", "default", {},
         {split: [{"id": 0, "context": c, "input": i, "answer": a, "options": o}] for split, (c, i, a, o) in INFINITE.items()}),
    Data("emozilla/pg19-test", "default", {"short_book_title": "string", "publication_date": "int32", "url": "string", "text": "string"},
         {"test": [{"short_book_title": "A book", "publication_date": 1900, "url": "u", "text": "It was a book of many words. " * 40}]}),
    Data("codeparrot/codeparrot-clean-valid", "default", dict.fromkeys(("repo_name", "path", "copies", "size", "content", "license"), "string") | {"hash": "int64", "line_mean": "float64", "line_max": "int64", "alpha_frac": "float64", "autogenerated": "bool"},
         {"train": [{"repo_name": "a/b", "path": "c.py", "copies": "1", "size": "9", "content": f"def f{n}(x):\n    return x\n" * 20, "license": "mit", "hash": n, "line_mean": 9.0, "line_max": 20, "alpha_frac": 0.5, "autogenerated": False} for n in range(2)]}),
]  # fmt: skip


def write(folder: Path) -> Path:
    """The mirror, marked as a fixture."""
    folder.mkdir(parents=True)
    (folder / "FIXTURE").write_text("A few made-up rows of each data set.\n")
    for path in dict.fromkeys(data.path for data in DATA):
        (folder / path).mkdir(parents=True)
        configs = [data for data in DATA if data.path == path]
        for data in configs:
            (folder / path / data.config).mkdir()
            for split, rows in data.splits.items():
                (folder / path / data.config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / path / "README.md").write_text("---\n" + "\n".join(_card(configs)) + "\n---\n")
    return folder


def _card(configs: list[Data]) -> list[str]:
    """The head of a data set's README: its configs, their files, and the types of their fields."""
    files = [
        {
            "config_name": data.config,
            "data_files": [{"split": split, "path": f"{data.config}/{split}.jsonl"} for split in data.splits],
        }
        for data in configs
    ]
    infos = [
        {"config_name": data.config, "features": [{"name": name} | _type(kind) for name, kind in data.fields.items()]}
        for data in configs
        if data.fields
    ]
    return [f"configs: {json.dumps(files)}"] + ([f"dataset_info: {json.dumps(infos)}"] if infos else [])


def _type(kind: Any) -> dict[str, Any]:
    match kind:
        case str():
            return {"dtype": kind}
        case [inner]:
            return {"list": inner}
        case tuple():
            return {"dtype": {"class_label": {"names": {str(i): name for i, name in enumerate(kind)}}}}
        case _:
            return {"struct": [{"name": name} | _type(inner) for name, inner in kind.items()]}
