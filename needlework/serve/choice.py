"""One answer on its way, from the engine's events to text that may be given out."""

from collections.abc import Sequence
from typing import NamedTuple

from needlework.serve.refused import RefusedError
from needlework.serve.request import Event, Request
from needlework.serve.text import Incremental, Piece, Stops, Text


class Scored(NamedTuple):
    """A token of an answer, with the logprobs that were asked for. at: characters of the answer in front of it."""

    piece: Piece
    logprob: float
    top: tuple[tuple[Piece, float], ...]
    at: int


class Delta(NamedTuple):
    """What some events add to an answer. finish: OpenAI's reason, in the last."""

    text: str
    scored: list[Scored]
    finish: str | None


class Choice:
    """One answer on its way, from the engine's events to text that may be given out."""

    def __init__(self, text: Text, request: Request, stops: Sequence[str]):
        self._text, self._request = text, request
        self._characters: Incremental = text.after(request.prompt)
        self._stops = Stops(stops)
        # a stop string ends the answer at a token; what came after it does not count
        self._single = bool(stops) or request.sampling.logprobs is not None
        self._length = 0
        self.tokens = 0
        self.finish: str | None = None

    def push(self, events: Sequence[Event]) -> Delta:
        """RefusedError where the engine has failed the request, or its grammar cannot be followed."""
        given, scored = "", []
        for group in [[event] for event in events] if self._single else [events]:
            if self.finish is None:
                at = self._length
                given += self._push(group)
                scored += [self._scored(event, at) for event in group if event.logprob is not None and not self._ends(event)]
        return Delta(given, scored, self.finish)

    def _push(self, events: Sequence[Event]) -> str:
        last = events[-1]
        if last.finish == "refused":
            raise RefusedError(f"response_format: {last.error}", "response_format")
        if last.finish in ("error", "cancelled"):
            why = last.error or "the server is ending"
            raise RefusedError(why, status=503, kind="server_error", code="unavailable")
        tokens = [event.token for event in events if event.token is not None]
        self.tokens += len(tokens)
        text = self._characters.push(tokens[: len(tokens) - self._ends(last)])
        self._length += len(text)
        given = self._stops.push(text)
        if last.finish is not None and not self._stops.found:
            given += self._stops.push(self._characters.rest())
            given += self._stops.rest()
        self.finish = "stop" if self._stops.found else last.finish
        return given

    def _ends(self, event: Event) -> bool:
        """Whether its token ends the text, and is none of it."""
        return event.finish == "stop" and event.token in self._request.stop_tokens

    def _scored(self, event: Event, at: int) -> Scored:
        assert event.token is not None and event.logprob is not None
        top = tuple((self._text.piece(token), logprob) for token, logprob in event.top)
        return Scored(self._text.piece(event.token), event.logprob, top, at)
