"""Rows of the data sets of recall, long texts and perplexity, and RULER's essays."""

from .rows import Data


def keyed(path: str, text: str) -> Data:
    fields = dict.fromkeys(("doc_id", "file_name", "key", "value", "text"), "string")
    row = {"doc_id": "0", "file_name": "0.htm", "key": "director", "value": "Ada Byron", "text": text}
    return Data(path, "default", fields, {"validation": [row, row | {"doc_id": "1", "value": "1843"}]})


def cloze(path: str, context: str, question: str, asked: str, answer: str) -> Data:
    fields = {"doc_id": "string", "context": "string", "question": "string", "orig_question": "string", "answers": ["string"]}
    row = {"doc_id": "0", "context": context, "question": question, "orig_question": asked, "answers": [answer, answer.upper()]}
    return Data(path, "default", fields, {"validation": [row, row | {"doc_id": "1", "answers": ["nothing of it"]}]})


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
    Data(
        "baber/paul_graham_essays",
        "default",
        {"title": "string", "text": "string"},
        {"train": [{"title": "On haystacks", "text": "A haystack is large. Most of it is hay.\nOne looks for long. " * 900}]},
    ),
    keyed(
        "hazyresearch/based-swde-v2", "The film was directed by Ada Byron in 1843 .\nSummary of information above...\ndirector:"
    ),
    keyed("hazyresearch/based-fda", "A device. Its director is Ada Byron. director:"),
    Data(
        "hazyresearch/based-squad",
        "default",
        dict.fromkeys(("id", "title", "context", "question", "text", "value"), "string"),
        {
            "validation": [
                {
                    "id": "0",
                    "title": "t",
                    "context": "Paris is in France.",
                    "question": "What is the capital of France?",
                    "text": "Paris is in France. The capital of France is",
                    "value": "Paris",
                },
                {
                    "id": "1",
                    "title": "t",
                    "context": "A passage.",
                    "question": "Who?",
                    "text": "Other words of a passage. It was",
                    "value": "Ada",
                },
            ]
        },
    ),
    cloze(
        "hazyresearch/based_triviaqa",
        "[DOC] [TLE] Lyon [PAR] Lyon lies on the Rhone. The river of Lyon is the",
        "The river of Lyon is the",
        "Which river?",
        "Rhone",
    ),
    cloze(
        "hazyresearch/based_nq_2048", "The first king was Alfred.", "The first king was", "who was the first king:", "Alfred"
    ),
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
    Data(
        "xinrongzhang2022/InfiniteBench",
        "default",
        {},
        {split: [{"id": 0, "context": c, "input": i, "answer": a, "options": o}] for split, (c, i, a, o) in INFINITE.items()},
    ),
    Data(
        "emozilla/pg19-test",
        "default",
        {"short_book_title": "string", "publication_date": "int32", "url": "string", "text": "string"},
        {
            "test": [
                {
                    "short_book_title": "A book",
                    "publication_date": 1900,
                    "url": "u",
                    "text": "It was a book of many words. " * 40,
                }
            ]
        },
    ),
    Data(
        "codeparrot/codeparrot-clean-valid",
        "default",
        dict.fromkeys(("repo_name", "path", "copies", "size", "content", "license"), "string")
        | {"hash": "int64", "line_mean": "float64", "line_max": "int64", "alpha_frac": "float64", "autogenerated": "bool"},
        {
            "train": [
                {
                    "repo_name": "a/b",
                    "path": "c.py",
                    "copies": "1",
                    "size": "9",
                    "content": f"def f{n}(x):\n    return x\n" * 20,
                    "license": "mit",
                    "hash": n,
                    "line_mean": 9.0,
                    "line_max": 20,
                    "alpha_frac": 0.5,
                    "autogenerated": False,
                }
                for n in range(2)
            ]
        },
    ),
]
