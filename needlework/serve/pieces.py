"""The pieces of a streamed answer as server-sent events. Most differ in their text alone: the rest is written once an answer."""

import json
from typing import Any

from needlework.serve.answers import Answers
from needlework.serve.choice import Delta

HERE = "\ue000"  # in place of the text while the rest is written; a character of private use


def event(piece: dict[str, Any]) -> bytes:
    return f"data: {_json(piece)}\n\n".encode()


class Pieces:
    """Of one request's answers."""

    def __init__(self, answers: Answers):
        self._answers = answers
        self._around: dict[int, tuple[str, str]] = {}  # what comes before and after the text, by answer

    def piece(self, index: int, delta: Delta) -> bytes:
        if delta.scored or delta.finish is not None or not delta.text:
            return event(self._answers.piece(index, delta))
        if index not in self._around:
            whole = event(self._answers.piece(index, Delta(HERE, [], None))).decode()
            before, _, behind = whole.rpartition(_json(HERE))  # a model may have that name, and comes first
            self._around[index] = before, behind
        before, behind = self._around[index]
        return f"{before}{_json(delta.text)}{behind}".encode()


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
