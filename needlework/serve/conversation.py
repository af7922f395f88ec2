"""A conversation from the side that asks: an answer in pieces, from an engine in this process or from a server's address."""

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from needlework.models.tokenizer import Messages
from needlework.serve.choice import Choice
from needlework.serve.interface import Engine
from needlework.serve.refused import RefusedError
from needlework.serve.request import Request, Sampling
from needlework.serve.text import Text


class Asking(NamedTuple):
    """How answers are drawn. most: tokens of one; None: as many as there is room for."""

    temperature: float = 1.0
    most: int | None = None


class Partner(Protocol):
    def answer(self, messages: Messages) -> Iterator[str]:
        """The text as it comes. ValueError for what the model does not take, RefusedError or OSError where it cannot answer."""
        ...


class Local:
    """A model in this process."""

    def __init__(self, engine: Engine, text: Text, asking: Asking):
        self._engine, self._text, self._asking = engine, text, asking

    def answer(self, messages: Messages) -> Iterator[str]:
        prompt = self._text.conversation(messages)
        if (room := self._engine.length - len(prompt)) < 1:
            raise ValueError(f"the conversation has {len(prompt)} tokens, as many as fit: begin another")
        most, sampling = min(room, self._asking.most or room), Sampling(temperature=self._asking.temperature)
        request = Request(id=uuid.uuid4().hex, prompt=prompt, max_tokens=most, sampling=sampling, stop_tokens=self._text.ends)
        choice, (stream,) = Choice(self._text, request, ()), self._engine.add_all([request])
        try:
            for event in stream:
                yield choice.push([event]).text
        finally:
            if choice.finish is None:
                stream.cancel()


class Remote:
    """A server that answers OpenAI's /v1/chat/completions. url: with or without /v1. model: None takes the first that it serves."""

    def __init__(self, url: str, asking: Asking, *, model: str | None = None, key: str | None = None):
        self._url, self._asking = url.rstrip("/").removesuffix("/v1") + "/v1", asking
        self._headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._model = model or self._first()

    def answer(self, messages: Messages) -> Iterator[str]:
        asked = {"model": self._model, "messages": messages, "stream": True, "temperature": self._asking.temperature}
        with self._open(
            "/chat/completions", asked if self._asking.most is None else asked | {"max_tokens": self._asking.most}
        ) as lines:
            for line in lines:
                said = line.decode().strip().removeprefix("data:").strip()
                if said and said != "[DONE]":
                    yield _said(json.loads(said))

    def _first(self) -> str:
        with self._open("/models") as answer:
            return json.load(answer)["data"][0]["id"]

    def _open(self, path: str, asked: dict[str, Any] | None = None) -> Any:
        body = None if asked is None else json.dumps(asked).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self._url + path, body, self._headers))
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self._url}: {_why(error)}") from None
        except urllib.error.URLError as error:
            raise OSError(f"{self._url}: {error.reason}") from None


def _said(piece: dict[str, Any]) -> str:
    if "error" in piece:
        raise RefusedError(piece["error"]["message"], status=503)
    return "".join(choice["delta"].get("content") or "" for choice in piece["choices"])


def _why(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):  # a server, but not one of this kind
        return f"{error.code} {error.reason}"
