"""The server: OpenAI's paths over an engine, by Starlette and uvicorn.

An answer's status is known with its first token: what fails before it has a status, what fails later an error event in the stream.
Each answer is written by a task of its own, which the engine's steps wake. Tokens that came while it did not run go out together.
A client that goes away cancels its requests. SIGTERM and SIGINT let running answers end and refuse new ones; a second one ends them.
"""

import asyncio
import secrets
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Received
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from needlework.serve import protocol
from needlework.serve.bell import Bell
from needlework.serve.interface import DrainingError, Engine, QueueFullError, Stream
from needlework.serve.metrics import Metrics
from needlework.serve.pieces import Pieces, event
from needlework.serve.protocol import Answers, Asked, Choice, Delta, Limits, RefusedError
from needlework.serve.request import Request
from needlework.serve.text import Text

BODY = 4 << 20  # bytes of a request
LAST_BYTES = 10  # seconds that a client has, once the engine has drained, to read what is its own
SERVER = {"kind": "server_error"}


class Front:
    """The paths, over one engine. key: what clients must send as `Authorization: Bearer`; None: nothing."""

    def __init__(self, engine: Engine, text: Text, *, name: str, key: str | None = None):
        self.engine, self.text = engine, text
        self.limits = Limits(name, engine.length, engine.vocabulary)
        self.metrics = Metrics(engine.stats)
        self.draining = False
        self._bell: Bell | None = None
        self._key = None if key is None else f"Bearer {key}".encode()
        self._failed: str | None = None
        self._made = int(time.time())

    def application(self) -> Starlette:
        get, post = {"methods": ["GET"]}, {"methods": ["POST"]}
        routes = [
            Route("/v1/completions", partial(self._complete, chat=False), **post),
            Route("/v1/chat/completions", partial(self._complete, chat=True), **post),
            Route("/v1/models", self._models, **get),
            Route("/v1/models/{name:path}", self._model, **get),
            Route("/health", self._health, **get),
            Route("/ready", self._ready, **get),
            Route("/metrics", self._numbers, **get),
        ]
        handlers = {RefusedError: _refused, HTTPException: _unknown, Exception: _broken}
        return Starlette(routes=routes, exception_handlers=handlers)

    def bell(self) -> Bell:
        """Of the loop that answers."""
        if self._bell is None:
            self._bell = Bell()
        return self._bell

    async def _complete(self, received: Received, chat: bool) -> Response:
        began = time.perf_counter()
        try:
            self._let_in(received)
            body = await _body(received)
            asked, requests, streams = await asyncio.to_thread(self._begin, body, chat)
        except RefusedError as error:
            self.metrics.answered(received.url.path, error.status)
            raise
        return _Answering(self, received.url.path, asked, requests, streams, began)

    def _begin(self, body: bytes, chat: bool) -> tuple[Asked, list[Request], list[Stream]]:
        """In a thread: a long prompt is encoded, and a grammar compiled, while other clients are answered."""
        asked = protocol.read(body, chat, self.text, self.limits)
        requests, streams = asked.requests(f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"), []
        try:
            for request in requests:
                streams.append(self._add(request))
        except RefusedError:
            for stream in streams:
                stream.cancel()
            raise
        return asked, requests, streams

    def _add(self, request: Request) -> Stream:
        try:
            return self.engine.add(request)
        except QueueFullError as error:
            code = "queue_full"
            raise RefusedError(
                str(error), status=429, kind="rate_limit_error", code=code, retry_after=error.retry_after
            ) from None
        except DrainingError as error:
            raise RefusedError(str(error), status=503, code="draining", **SERVER) from None
        except ValueError as error:  # the numbers were checked: what is left is the grammar
            raise RefusedError(str(error), "response_format" if request.grammar is not None else None) from None
        except RuntimeError as error:
            self._failed = str(error)
            raise RefusedError(str(error), status=503, code="unavailable", **SERVER) from None

    def _let_in(self, received: Received) -> None:
        sent = received.headers.get("authorization", "").encode("latin-1")  # the bytes that came
        if self._key is not None and not secrets.compare_digest(sent, self._key):
            raise RefusedError("the API key is missing or not that of this server", status=401, code="invalid_api_key")

    async def _models(self, received: Received) -> Response:
        self._let_in(received)
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, received: Received) -> Response:
        self._let_in(received)
        if received.path_params["name"] != self.limits.name:
            words = f"model {received.path_params['name']!r} is not served here; {self.limits.name!r} is"
            raise RefusedError(words, "model", status=404, code="model_not_found")
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        own = {"id": self.limits.name, "object": "model", "created": self._made, "owned_by": "needlework"}
        return own | {"max_model_len": self.limits.length}

    async def _health(self, received: Received) -> Response:
        """Whether the process can serve; one that cannot is to be started again."""
        if self._failed is not None:
            raise RefusedError(self._failed, status=503, code="unavailable", **SERVER)
        return JSONResponse({"status": "ok"})

    async def _ready(self, received: Received) -> Response:
        """Whether to send it requests."""
        if self.draining:
            raise RefusedError("the server is ending and takes no more requests", status=503, code="draining", **SERVER)
        return await self._health(received)

    async def _numbers(self, received: Received) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


class _Answering(Response):
    """The answer to one request, from the events of its streams, for as long as the client is there."""

    def __init__(
        self, front: Front, path: str, asked: Asked, requests: Sequence[Request], streams: Sequence[Stream], began: float
    ):
        self._front, self._path, self._asked, self._streams, self._began = front, path, asked, streams, began
        self._choices = [Choice(front.text, request, asked.stops) for request in requests]
        self._answers = Answers(requests[0].id.rpartition("-")[0], asked, front.limits.name)
        self._pieces = Pieces(self._answers)
        self._there = asyncio.Event()
        self._status: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for stream in self._streams:
            stream.listen(self._front.bell(), self._there.set)
        tell = asyncio.create_task(self._tell(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((tell, gone), return_when=asyncio.FIRST_COMPLETED)
            if tell.done():
                tell.result()
        finally:
            for stream, choice in zip(self._streams, self._choices, strict=True):
                if choice.finish is None:
                    stream.cancel()
            for task in (tell, gone):
                task.cancel()
            await asyncio.gather(tell, gone, return_exceptions=True)
            self._front.metrics.answered(self._path, self._status or 499)  # 499: the client had gone

    async def _deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What all answers have got since the last time, until all are over. RefusedError where one has failed."""
        first = True
        while any(choice.finish is None for choice in self._choices):
            await self._there.wait()
            self._there.clear()
            if first:
                self._front.metrics.first_token(time.perf_counter() - self._began)
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
            self._front.metrics.whole(time.perf_counter() - self._began)
        except RefusedError as error:
            if self._status is None:
                self._status = error.status
                await _error(error)(scope, receive, send)
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


async def _body(received: Received) -> bytes:
    body = bytearray()
    with suppress(ClientDisconnect):  # what it had sent is not JSON, or it goes away again where it is answered
        async for part in received.stream():
            body += part
            if len(body) > BODY:
                raise RefusedError(f"the body has more than {BODY} bytes", status=413, code="request_too_large")
    return bytes(body)


def _error(error: RefusedError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(max(1, round(error.retry_after)))}
    headers |= {"www-authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse(error.body, error.status, headers)


async def _refused(received: Received, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _error(error)


async def _unknown(received: Received, error: Exception) -> Response:
    """A path or a method that is none of these."""
    assert isinstance(error, HTTPException)
    return _error(RefusedError(f"{received.method} {received.url.path}: {error.detail}", status=error.status_code))


async def _broken(received: Received, error: Exception) -> Response:
    """A mistake of ours; Starlette raises it again behind the answer, so that the log has it."""
    return _error(RefusedError("the server has failed; its log says why", status=500, **SERVER))


class Server(uvicorn.Server):
    """Ends on the first SIGTERM or SIGINT once the running answers are over, with status 0; on the second at once."""

    def __init__(self, front: Front):
        super().__init__(
            uvicorn.Config(
                front.application(), lifespan="off", log_level="warning", timeout_graceful_shutdown=LAST_BYTES, ws="none"
            )
        )
        self._front = front

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._front.draining:
            self.should_exit = self.force_exit = True
            return
        self._front.draining = True
        threading.Thread(target=self._drain, name="needlework drain", daemon=True).start()

    def _drain(self) -> None:
        try:
            self._front.engine.drain()
        finally:
            self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address; port 0: one that is free. OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"{host}:{port}: {error}") from None


def serve(front: Front, bound: socket.socket) -> None:
    """Answers there until a signal ends it."""
    Server(front).run([bound])
