"""One request's answer on its way to its client.

Each answer is written by a task of its own, which the engine's steps wake. Tokens that came while it did not run go out together.
A client that goes away cancels its requests.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from needlework.serve.answers import Answers
from needlework.serve.asked import Asked
from needlework.serve.bell import Bell
from needlework.serve.choice import Choice, Delta
from needlework.serve.interface import Stream
from needlework.serve.metrics import Metrics
from needlework.serve.pieces import Pieces, event
from needlework.serve.refused import RefusedError
from needlework.serve.request import Request
from needlework.serve.text import Text


class Shared(NamedTuple):
    """By all answers of a front. name: the model's. bell: of the loop that answers, made there."""

    text: Text
    name: str
    metrics: Metrics
    bell: Callable[[], Bell]


class Answering(Response):
    """The answer to one request, from the events of its streams, for as long as the client is there."""

    def __init__(
        self, shared: Shared, path: str, asked: Asked, requests: Sequence[Request], streams: Sequence[Stream], began: float
    ):
        self._shared, self._path, self._asked, self._streams, self._began = shared, path, asked, streams, began
        self._choices = [Choice(shared.text, request, asked.stops) for request in requests]
        self._answers = Answers(requests[0].id.rpartition("-")[0], asked, shared.name)
        self._pieces = Pieces(self._answers)
        self._there = asyncio.Event()
        self._status: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for stream in self._streams:
            stream.listen(self._shared.bell(), self._there.set)
        tell = asyncio.create_task(self._tell(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((tell, gone), return_when=asyncio.FIRST_COMPLETED)
            if tell.done():
                tell.result()
        except Exception:  # a mistake of ours: where nothing is on its way, the client gets a 500
            self._status = self._status or 500
            raise
        finally:
            for stream, choice in zip(self._streams, self._choices, strict=True):
                if choice.finish is None:
                    stream.cancel()
            for task in (tell, gone):
                task.cancel()
            await asyncio.gather(tell, gone, return_exceptions=True)
            self._shared.metrics.answered(self._path, self._status or 499)  # 499: the client had gone

    async def _deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What all answers have got since the last time, until all are over. RefusedError where one has failed."""
        first = True
        while any(choice.finish is None for choice in self._choices):
            await self._there.wait()
            self._there.clear()
            if first:
                self._shared.metrics.first_token(time.perf_counter() - self._began)
                first = False
            yield [delta for i in range(len(self._choices)) if (delta := self._delta(i)) is not None]

    def _delta(self, i: int) -> tuple[int, Delta] | None:
        choice = self._choices[i]
        if choice.finish is not None or not (taken := self._streams[i].take()):
            return None
        delta = choice.push(taken)
        if delta.finish is not None and taken[-1].finish is None:  # by a stop string, of which the engine knows nothing
            self._streams[i].cancel()
        return i, delta

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await (self._stream(send) if self._asked.stream else self._whole(scope, receive, send))
            self._shared.metrics.whole(time.perf_counter() - self._began)
        except RefusedError as error:
            if self._status is None:
                self._status = error.status
                await refusal(error)(scope, receive, send)
            else:  # the stream has begun: its status cannot change, and it ends without [DONE]
                await send({"type": "http.response.body", "body": event(error.body), "more_body": False})

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        got: list[list[Delta]] = [[] for _ in self._choices]
        async for deltas in self._deltas():
            for i, delta in deltas:
                got[i].append(delta)
        whole = [Delta("".join(d.text for d in parts), [s for d in parts for s in d.scored], parts[-1].finish) for parts in got]
        self._status = 200
        await JSONResponse(self._answers.whole(whole, self._tokens()))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async for deltas in self._deltas():
            said = [self._pieces.piece(i, delta) for i, delta in deltas if delta.text or delta.scored or delta.finish]
            if self._status is None:
                self._status = 200
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                said[:0] = [event(self._answers.opening(i)) for i in range(len(self._choices))] if self._asked.chat else []
            if said:
                await send({"type": "http.response.body", "body": b"".join(said), "more_body": True})
        usage = event(self._answers.closing(self._tokens())) if self._asked.usage else b""
        await send({"type": "http.response.body", "body": usage + b"data: [DONE]\n\n", "more_body": False})

    def _tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(error: RefusedError) -> Response:
    """OpenAI's error object, with its status and headers."""
    headers = {} if error.retry_after is None else {"retry-after": str(max(1, round(error.retry_after)))}
    headers |= {"www-authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse(error.body, error.status, headers)
