"""OpenAI's objects for the answers to one request: the whole, or the pieces of a stream."""

import time
from collections.abc import Sequence
from typing import Any

from needlework.serve.asked import Asked
from needlework.serve.choice import Delta, Scored


class Answers:
    """OpenAI's objects for one request: the whole, or the pieces of a stream."""

    def __init__(self, id: str, asked: Asked, model: str):
        kind = "chat.completion" if asked.chat else "text_completion"
        self._asked, self._chunk = asked, "chat.completion.chunk" if asked.chat else kind
        self._head = {"id": id, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, deltas: Sequence[Delta], tokens: int) -> dict[str, Any]:
        choices = [self._choice(i, delta, whole=True) for i, delta in enumerate(deltas)]
        return self._head | {"choices": choices, "usage": self._usage(tokens)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first piece of a chat's answer says who speaks."""
        return self._piece(
            [{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]
        )

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._piece([self._choice(index, delta, whole=False)])

    def closing(self, tokens: int) -> dict[str, Any]:
        """The last piece of a stream that is to say its usage."""
        return self._piece([]) | {"usage": self._usage(tokens)}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"usage": None} if self._asked.usage else {}
        return self._head | {"object": self._chunk, "choices": choices} | more

    def _choice(self, index: int, delta: Delta, whole: bool) -> dict[str, Any]:
        end = {"logprobs": self._logprobs(delta.scored), "finish_reason": delta.finish}
        if not self._asked.chat:
            return {"index": index, "text": delta.text} | end
        if whole:
            return {"index": index, "message": {"role": "assistant", "content": delta.text, "refusal": None}} | end
        return {"index": index, "delta": {"content": delta.text} if delta.text else {}} | end

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = sum(map(len, self._asked.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if self._asked.sampling.logprobs is None:
            return None
        if self._asked.chat:
            one = lambda piece, logprob: {"token": piece.text, "logprob": logprob, "bytes": piece.bytes}
            return {
                "content": [one(s.piece, s.logprob) | {"top_logprobs": [one(*t) for t in s.top]} for s in scored],
                "refusal": None,
            }
        return {
            "tokens": [s.piece.text for s in scored],
            "token_logprobs": [s.logprob for s in scored],
            "top_logprobs": [_by_text(s) for s in scored],
            "text_offset": [s.at for s in scored],
        }


def _by_text(scored: Scored) -> dict[str, float]:
    """The likeliest tokens and the answer's own. Several may have one text, as torn characters do: the likeliest of them counts."""
    found: dict[str, float] = {}
    for piece, logprob in (*scored.top, (scored.piece, scored.logprob)):
        found.setdefault(piece.text, logprob)
    return found
