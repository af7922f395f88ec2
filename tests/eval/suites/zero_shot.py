"""Rows of the data sets of zero-shot tasks."""

from typing import Any

from .rows import Data


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


RACE = {
    "article": "Tom has a red kite.",
    "answer": "B",
    "question": "What colour is the kite?",
    "options": ["blue", "red", "green", "white"],
}
CLOZE = {f"input_sentence_{n}": f"Sentence {n}." for n in range(1, 5)}
WIKI = {"page": " = A title = \n The first line , of nine words , is here . \n"}
PASSAGE = "Ada wrote.\n@highlight\nAda Byron wrote a program\n@highlight\nCharles built"

DATA = [
    Data(
        "EleutherAI/wikitext_document_level",
        "wikitext-2-raw-v1",
        {"page": "string"},
        {key: [WIKI, {"page": "Two words"}] for key in ("train", "validation", "test")},
    ),
    Data(
        "EleutherAI/lambada_openai",
        "default",
        {"text": "string"},
        {"test": [{"text": "the cat sat on the mat"}, {"text": "one and two"}]},
    ),
    Data(
        "baber/piqa",
        "default",
        {"goal": "string", "sol1": "string", "sol2": "string", "label": ("0", "1")},
        {
            key: [
                {"goal": "open a jar", "sol1": "twist the lid", "sol2": "sing", "label": 0},
                {"goal": "cut", "sol1": "x", "sol2": "use a knife", "label": 1},
            ]
            for key in ("train", "validation")
        },
    ),
    Data(
        "Rowan/hellaswag",
        "default",
        {
            "ind": "int32",
            "activity_label": "string",
            "ctx_a": "string",
            "ctx_b": "string",
            "ctx": "string",
            "endings": ["string"],
            "source_id": "string",
            "split": "string",
            "split_type": "string",
            "label": "string",
        },
        {
            key: [
                {
                    "ind": 4,
                    "activity_label": "Cooking",
                    "ctx_a": "A man cuts bread.",
                    "ctx_b": "he",
                    "ctx": "A man cuts bread. he",
                    "endings": ["eats it. [title] Done", "flies.", "is a fish.", "x"],
                    "source_id": "a",
                    "split": "val",
                    "split_type": "indomain",
                    "label": "0",
                }
            ]
            for key in ("train", "validation")
        },
    ),
    Data(
        "allenai/winogrande",
        "winogrande_xl",
        {"sentence": "string", "option1": "string", "option2": "string", "answer": "string"},
        {
            key: [
                {
                    "sentence": "The cup did not fit the box because the _ was small.",
                    "option1": "cup",
                    "option2": "box",
                    "answer": "2",
                }
            ]
            for key in ("train", "validation")
        },
    ),
    choices("ARC-Easy"),
    choices("ARC-Challenge"),
    Data(
        "allenai/openbookqa",
        "main",
        {
            "id": "string",
            "question_stem": "string",
            "choices": {"text": ["string"], "label": ["string"]},
            "answerKey": "string",
        },
        {
            key: [
                {
                    "id": "q",
                    "question_stem": "The sun is",
                    "choices": {"text": ["a star", "a cat", "ice", "wood"], "label": list("ABCD")},
                    "answerKey": "A",
                }
            ]
            for key in ("train", "validation", "test")
        },
    ),
    Data(
        "lighteval/siqa",
        "default",
        dict.fromkeys(("context", "question", "answerA", "answerB", "answerC", "label"), "string"),
        {
            key: [
                {
                    "context": "Sam won.",
                    "question": "How does Sam feel?",
                    "answerA": "sad",
                    "answerB": "glad",
                    "answerC": "old",
                    "label": "2",
                }
            ]
            for key in ("train", "validation")
        },
    ),
    glue(
        "boolq",
        {"question": "string", "passage": "string", "idx": "int32"},
        {"question": "is ice cold", "passage": "Ice is cold.", "idx": 0, "label": 1},
    ),
    glue(
        "copa",
        {"premise": "string", "choice1": "string", "choice2": "string", "question": "string", "idx": "int32"},
        {
            "premise": "It rained.",
            "choice1": "The street was wet.",
            "choice2": "The street was dry.",
            "question": "effect",
            "idx": 0,
            "label": 0,
        },
    ),
    glue(
        "multirc",
        {
            "paragraph": "string",
            "question": "string",
            "answer": "string",
            "idx": {"paragraph": "int32", "question": "int32", "answer": "int32"},
        },
        {
            "paragraph": "Tom ran.",
            "question": "Who ran?",
            "answer": "Tom",
            "idx": {"paragraph": 0, "question": 0, "answer": 0},
            "label": 1,
        },
    ),
    glue(
        "wic",
        {
            "word": "string",
            "sentence1": "string",
            "sentence2": "string",
            "start1": "int32",
            "start2": "int32",
            "end1": "int32",
            "end2": "int32",
            "idx": "int32",
        },
        {
            "word": "bank",
            "sentence1": "the bank of a river",
            "sentence2": "a bank with money",
            "start1": 4,
            "start2": 2,
            "end1": 8,
            "end2": 6,
            "idx": 0,
            "label": 0,
        },
    ),
    glue(
        "record",
        {
            "passage": "string",
            "query": "string",
            "entities": ["string"],
            "answers": ["string"],
            "idx": {"passage": "int32", "query": "int32"},
        },
        {
            "passage": PASSAGE,
            "query": "@placeholder wrote the first program",
            "entities": ["Charles", "Ada"],
            "answers": ["Ada"],
            "idx": {"passage": 0, "query": 0},
        },
    ),
    Data(
        "ehovy/race",
        "middle",
        {"example_id": "string", "article": "string", "answer": "string", "question": "string", "options": ["string"]},
        {key: [{"example_id": "middle1.txt"} | RACE] for key in ("train", "validation", "test")},
    ),
    Data(
        "LSDSem/story_cloze",
        "2016",
        {"story_id": "string"}
        | dict.fromkeys((*CLOZE, "sentence_quiz1", "sentence_quiz2"), "string")
        | {"answer_right_ending": "int32"},
        {
            key: [
                {"story_id": "s"}
                | CLOZE
                | {"sentence_quiz1": "A good end.", "sentence_quiz2": "Bread.", "answer_right_ending": 1}
            ]
            for key in ("validation", "test")
        },
    ),
]
