"""OpenAI's /v1/completions and /v1/chat/completions: what a client asks for, checked by hand, and what it is answered.

Refused are fields out of range, and those that would change an answer and are not served, by name; `HARMLESS` are ignored. Beyond
OpenAI's fields: top_k, min_p, repetition_penalty, ignore_eos, and response_format {"type": "regex", "pattern": …}.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from needlework.serve import grammar
from needlework.serve.request import Event, Request, Sampling
from needlework.serve.text import Incremental, Piece, Stops, Text

HARMLESS = frozenset({
    "user", "store", "metadata", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "parallel_tool_calls",
})  # fmt: skip
NEUTRAL = {"best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none",), "modalities": (["text"],)}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant")
CHOICES, PROMPTS, STOPS, STOP_LENGTH, LOGPROBS = 8, 64, 4, 256, 20
COLDEST = 1e-4  # a temperature below it is greedy: it takes logits out of float32's range
SEEDS = 1 << 63


class RefusedError(Exception):
    """A request that is not answered. param: the field, in OpenAI's error object."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Limits(NamedTuple):
    """Of the model that is served: its name, tokens of a request with its answer, tokens that there are."""

    name: str
    length: int
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A client's request, checked. Each prompt has n answers; answer i is of prompt i // n."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    n: int
    most: tuple[int, ...]  # tokens of an answer, by prompt
    sampling: Sampling
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    grammar: str | None
    stream: bool
    usage: bool  # whether a stream ends with it

    def requests(self, id: str) -> list[Request]:
        """One an answer; with a seed, the next answer of a prompt has the next seed."""
        return [
            Request(
                id=f"{id}-{i}",
                prompt=self.prompts[i // self.n],
                max_tokens=self.most[i // self.n],
                sampling=self._sampling(i % self.n),
                stop_tokens=self.stop_tokens,
                grammar=self.grammar,
            )
            for i in range(len(self.prompts) * self.n)
        ]

    def _sampling(self, i: int) -> Sampling:
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + i) % SEEDS)


def read(body: bytes, chat: bool, text: Text, limits: Limits) -> Asked:
    """RefusedError says what is wrong, and in which field."""
    try:
        return _read(body, chat, text, limits)
    except RecursionError:
        raise RefusedError("the body is nested too deeply") from None


def _read(body: bytes, chat: bool, text: Text, limits: Limits) -> Asked:
    try:
        asked = json.loads(body, parse_constant=_not_a_number)
    except ValueError as error:
        raise RefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise RefusedError("the body is not a JSON object")
    fields = _Fields(asked)
    if (model := fields.string("model")) not in (None, limits.name):
        raise RefusedError(
            f"model {model!r} is not served here; {limits.name!r} is", "model", status=404, code="model_not_found"
        )
    prompts = (_conversation(fields, text),) if chat else _prompts(fields, text, limits.vocabulary)
    where = "messages" if chat else "prompt"
    most = _most(fields, chat, where, [len(prompt) for prompt in prompts], limits.length)
    stream = fields.flag("stream")
    found = Asked(
        chat=chat,
        prompts=prompts,
        n=fields.whole("n", 1, CHOICES) or 1,
        most=most,
        sampling=_sampling(fields, chat),
        stops=_stops(fields),
        stop_tokens=frozenset() if fields.flag("ignore_eos") else text.ends,
        grammar=_grammar(fields),
        stream=stream,
        usage=_usage(fields, stream),
    )
    fields.close()
    return found


def _not_a_number(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


class _Fields:
    """The fields of an object; null is as good as absent. `close` refuses those that nobody asked for."""

    def __init__(self, fields: Mapping[str, Any], inside: str = ""):
        self._left = {name: value for name, value in fields.items() if value is not None}
        self._inside = inside

    def name(self, field: str) -> str:
        return self._inside + field

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def refuse(self, name: str, value: Any, expected: str) -> RefusedError:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        return RefusedError(f"{self.name(name)}: got {shown}, expected {expected}", self.name(name))

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise self.refuse(name, value, "true or false")
        return bool(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not _text(value):
            raise self.refuse(name, value, "a string of Unicode characters")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is not None and not (_whole(value) and low <= value <= high):
            raise self.refuse(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float, above: bool = False) -> float:
        """above: low itself is out of range."""
        value = self.take(name)
        if value is None:
            return default
        real = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not real or (above and value == low):
            raise self.refuse(
                name, value, f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
            )
        return float(value)

    def inside(self, name: str) -> "_Fields | None":
        value = self.take(name)
        if not isinstance(value, dict | None):
            raise self.refuse(name, value, "an object")
        return None if value is None else _Fields(value, f"{self.name(name)}.")

    def close(self, harmless: frozenset[str] = HARMLESS) -> None:
        for name, value in self._left.items():
            if name not in harmless and value not in NEUTRAL.get(name, ()):
                raise RefusedError(f"{self.name(name)} is not supported here", self.name(name), code="unsupported_parameter")


def _text(value: Any) -> bool:
    """Whether it is a string that has UTF-8: JSON's escapes can write half a character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompts(fields: _Fields, text: Text, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """A text, or tokens, or a list of either."""
    given = fields.take("prompt")
    several = isinstance(given, list) and not (given and all(map(_whole, given)))
    prompts = given if several else [given]
    if several and not 1 <= len(prompts) <= PROMPTS:
        raise RefusedError(f"prompt: got {len(prompts)} prompts, expected 1 to {PROMPTS}", "prompt")
    return tuple(_prompt(fields, prompt, text, vocabulary) for prompt in prompts)


def _prompt(fields: _Fields, given: Any, text: Text, vocabulary: int) -> tuple[int, ...]:
    if _text(given):
        tokens = text.encode(given)
    elif isinstance(given, list) and all(_whole(token) and 0 <= token < vocabulary for token in given):
        tokens = tuple(given)
    else:
        raise fields.refuse(
            "prompt", given, f"a text, token ids from 0 to {vocabulary - 1}, or a list of texts or of lists of ids"
        )
    if not tokens:
        raise RefusedError("prompt: has no token, expected at least one to go on from", "prompt")
    return tokens


def _conversation(fields: _Fields, text: Text) -> tuple[int, ...]:
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise fields.refuse("messages", given, "a list of at least one message")
    messages = [_message(fields, f"messages[{i}]", message) for i, message in enumerate(given)]
    try:
        tokens = text.conversation(messages)
    except ValueError as error:
        raise RefusedError(str(error), "messages") from None
    if not tokens:
        raise RefusedError("messages: the chat template makes no token of them", "messages")
    return tokens


def _message(fields: _Fields, where: str, given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise fields.refuse(where, given, "an object with role and content")
    message = _Fields(given, f"{where}.")
    role, name, content = message.string("role"), message.string("name"), message.take("content")
    if role not in ROLES:
        raise message.refuse("role", role, f"one of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        parts = [part.get("text") for part in content]
        content = "".join(map(str, parts)) if all(map(_text, parts)) else content
    if not _text(content):
        raise message.refuse("content", content, 'a text, or a list of {"type": "text", "text": …}')
    message.close(frozenset({"refusal", "annotations"}))  # an answer of ours sent back may have them
    said = {"role": "system" if role == "developer" else role, "content": content}
    return said if name is None else said | {"name": name}


def _most(fields: _Fields, chat: bool, where: str, prompts: Sequence[int], length: int) -> tuple[int, ...]:
    """Tokens of an answer, by prompt: of a completion 16 unless asked, in a chat as many as there is room for."""
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    asked = {name: value for name in names if (value := fields.whole(name, 1, length)) is not None}
    if len(set(asked.values())) > 1:
        raise RefusedError("max_tokens and max_completion_tokens differ, expected one of them", "max_completion_tokens")
    if (longest := max(prompts)) >= length:
        raise RefusedError(
            f"{where}: {longest} tokens, expected fewer than the model's length of {length}",
            where,
            code="context_length_exceeded",
        )
    if not asked:
        return tuple(length - tokens if chat else min(16, length - tokens) for tokens in prompts)
    name, most = next(iter(asked.items()))
    if longest + most > length:
        raise RefusedError(
            f"{name}: {longest} tokens of {where} and {most} of the answer, expected at most {length} together",
            name,
            code="context_length_exceeded",
        )
    return (most,) * len(prompts)


def _sampling(fields: _Fields, chat: bool) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0, 2)
    seed = fields.whole("seed", -SEEDS, SEEDS - 1)
    return Sampling(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_k=fields.whole("top_k", 0, SEEDS) or 0,
        top_p=fields.number("top_p", 1.0, 0, 1, above=True),
        min_p=_below_one(fields, "min_p"),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 10, above=True),
        seed=None if seed is None else seed % SEEDS,
        logprobs=_logprobs(fields, chat),
    )


def _below_one(fields: _Fields, name: str) -> float:
    value = fields.number(name, 0.0, 0, 1)
    if value == 1:
        raise fields.refuse(name, value, "a number below 1")
    return value


def _logprobs(fields: _Fields, chat: bool) -> int | None:
    if not chat:
        return fields.whole("logprobs", 0, LOGPROBS)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, LOGPROBS)
    if top is not None and not wanted:
        raise RefusedError("top_logprobs: needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _stops(fields: _Fields) -> tuple[str, ...]:
    given = fields.take("stop")
    stops = [] if given is None else given if isinstance(given, list) else [given]
    if len(stops) > STOPS or not all(_text(stop) and 1 <= len(stop) <= STOP_LENGTH for stop in stops):
        raise fields.refuse("stop", given, f"at most {STOPS} texts of 1 to {STOP_LENGTH} characters")
    return tuple(stops)


def _usage(fields: _Fields, stream: bool) -> bool:
    options = fields.inside("stream_options")
    if options is None:
        return False
    if not stream:
        raise RefusedError("stream_options: needs stream: true", "stream_options")
    wanted = options.flag("include_usage")
    options.close(frozenset({"include_obfuscation"}))
    return wanted


def _grammar(fields: _Fields) -> str | None:
    described = fields.inside("response_format")
    if described is None:
        return None
    kind, found = described.string("type"), None
    try:
        if kind == "json_object":
            found = grammar.of_schema({"type": "object"})
        elif kind == "json_schema":
            found = grammar.of_schema(_schema(described))
        elif kind == "regex":
            if (pattern := described.string("pattern")) is None:
                raise described.refuse("pattern", None, "a regular expression")
            found = grammar.of_regex(pattern)
        elif kind != "text":
            raise described.refuse("type", kind, "text, json_object, json_schema or regex")
    except ValueError as error:
        raise RefusedError(f"response_format: {error}", "response_format") from None
    described.close(frozenset())
    return found


def _schema(described: _Fields) -> dict[str, Any]:
    wrapped = described.inside("json_schema")
    if wrapped is None:
        raise described.refuse("json_schema", None, "an object with a schema")
    schema = wrapped.take("schema")
    if not isinstance(schema, dict):
        raise wrapped.refuse("schema", schema, "a JSON schema, as an object")
    wrapped.close(frozenset({"name", "description", "strict"}))  # every schema is kept strictly
    return schema


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
        """RefusedError where the engine has failed the request."""
        given, scored = "", []
        for group in [[event] for event in events] if self._single else [events]:
            if self.finish is None:
                at = self._length
                given += self._push(group)
                scored += [self._scored(event, at) for event in group if event.logprob is not None and not self._ends(event)]
        return Delta(given, scored, self.finish)

    def _push(self, events: Sequence[Event]) -> str:
        last = events[-1]
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
            "top_logprobs": [{piece.text: logprob for piece, logprob in s.top} for s in scored],
            "text_offset": [s.at for s in scored],
        }
