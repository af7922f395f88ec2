"""The paths of OpenAI's API over an engine, as a Starlette application.

An answer's status is known with its first token: what fails before it has a status, what fails later an error event in the stream.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Received
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from needlework.serve import asked
from needlework.serve.answering import Answering, Shared, refusal
from needlework.serve.asked import Asked, Limits
from needlework.serve.bell import Bell
from needlework.serve.courier import COMPILERS
from needlework.serve.interface import DrainingError, Engine, GrammarError, QueueFullError, Stream
from needlework.serve.metrics import Metrics
from needlework.serve.refused import RefusedError
from needlework.serve.request import Request
from needlework.serve.text import Text

BODY = 4 << 20  # bytes of a request
SERVER = {"kind": "server_error"}
GONE = 499  # as nginx counts a client that did not wait for its answer


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
        # of their own: requests that wait for a grammar take no thread from others
        self._grammars = ThreadPoolExecutor(COMPILERS, thread_name_prefix="needlework grammar")
        self._made = int(time.time())
        self._shared = Shared(text, name, self.metrics, self._own_bell)

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

    def _own_bell(self) -> Bell:
        if self._bell is None:
            self._bell = Bell()
        return self._bell

    async def _complete(self, received: Received, chat: bool) -> Response:
        began = time.perf_counter()
        try:
            self._let_in(received)
            body = await _body(received)
            found, requests, streams = await asyncio.to_thread(self._begin, body, chat)
            if streams is None:
                streams = await asyncio.get_running_loop().run_in_executor(self._grammars, self._add, requests)
        except Exception as error:
            self.metrics.answered(received.url.path, error.status if isinstance(error, RefusedError) else 500)
            raise
        return Answering(self._shared, received.url.path, found, requests, streams, began)

    def _begin(self, body: bytes, chat: bool) -> tuple[Asked, list[Request], Sequence[Stream] | None]:
        """In a thread: a long prompt is encoded while other clients are answered. None: a grammar is to be compiled first."""
        found = asked.read(body, chat, self.text, self.limits)
        requests = found.requests(f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}")
        return found, requests, self._add(requests) if found.grammar is None else None

    def _add(self, requests: Sequence[Request]) -> Sequence[Stream]:
        try:
            return self.engine.add_all(requests)
        except QueueFullError as error:
            code = "queue_full"
            raise RefusedError(
                str(error), status=429, kind="rate_limit_error", code=code, retry_after=error.retry_after
            ) from None
        except DrainingError as error:
            raise RefusedError(str(error), status=503, code="draining", **SERVER) from None
        except GrammarError as error:
            raise RefusedError(f"response_format: {error}", "response_format") from None
        except ValueError as error:
            raise RefusedError(str(error)) from None
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
            raise asked.unserved(received.path_params["name"], self.limits)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        own = {"id": self.limits.name, "object": "model", "created": self._made, "owned_by": "needlework"}
        return own | {"max_model_len": self.limits.length}

    async def _health(self, received: Received) -> Response:
        """Whether the process can serve; one that cannot has to be started again."""
        if self._failed is not None:
            raise RefusedError(self._failed, status=503, code="unavailable", **SERVER)
        return JSONResponse({"status": "ok"})

    async def _ready(self, received: Received) -> Response:
        """Whether to send it requests."""
        if self.draining:
            raise RefusedError("the server is ending and takes no more requests", status=503, code="draining", **SERVER)
        return await self._health(received)

    async def _numbers(self, received: Received) -> Response:
        try:
            text = await asyncio.to_thread(self.metrics.text)
        except RuntimeError as error:
            raise RefusedError(str(error), status=503, code="unavailable", **SERVER) from None
        return Response(text, media_type="text/plain; version=0.0.4")


async def _body(received: Received) -> bytes:
    body = bytearray()
    try:
        async for part in received.stream():
            body += part
            if len(body) > BODY:
                raise RefusedError(
                    f"the body has {len(body)} bytes or more, expected at most {BODY}", status=413, code="request_too_large"
                )
    except ClientDisconnect:  # nobody reads this answer, but it is counted
        raise RefusedError(f"the client has gone behind {len(body)} bytes of its body", status=GONE) from None
    return bytes(body)


async def _refused(received: Received, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return refusal(error)


async def _unknown(received: Received, error: Exception) -> Response:
    """A path or a method that is none of these."""
    assert isinstance(error, HTTPException)
    return refusal(RefusedError(f"{received.method} {received.url.path}: {error.detail}", status=error.status_code))


async def _broken(received: Received, error: Exception) -> Response:
    """A mistake of ours; Starlette raises it again behind the answer, so that the log has it."""
    return refusal(RefusedError("the server has failed; its log says why", status=500, **SERVER))
