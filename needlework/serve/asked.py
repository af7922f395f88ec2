"""OpenAI's /v1/completions and /v1/chat/completions: what a client asks for, checked by hand.

Refused are fields out of range, and those that would change an answer and are not served, by name; `HARMLESS` are ignored. Beyond
OpenAI's fields: top_k, min_p, repetition_penalty, ignore_eos, and response_format {"type": "regex", "pattern": …}.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from needlework.serve import grammar
from needlework.serve.prompts import conversation, prompts
from needlework.serve.refused import RefusedError
from needlework.serve.request import Request, Sampling
from needlework.serve.sent import Fields, is_text, shown
from needlework.serve.text import Text

CHOICES, STOPS, STOP_LENGTH, LOGPROBS = 8, 4, 256, 20
COLDEST = 1e-4  # a temperature below it is greedy: it takes logits out of float32's range
SEEDS = 1 << 63


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
        raise RefusedError(f"the body is {shown(asked)}, expected a JSON object")
    fields = Fields(asked)
    if (model := fields.string("model")) not in (None, limits.name):
        raise unserved(str(model), limits)
    given = (conversation(fields, text),) if chat else prompts(fields, text, limits.vocabulary)
    where = "messages" if chat else "prompt"
    most = _most(fields, chat, where, [len(prompt) for prompt in given], limits.length)
    stream = fields.flag("stream")
    found = Asked(
        chat=chat,
        prompts=given,
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


def unserved(model: str, limits: Limits) -> RefusedError:
    return RefusedError(
        f"model: got {shown(model)}, expected {shown(limits.name)}, which is served here",
        "model",
        status=404,
        code="model_not_found",
    )


def _not_a_number(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _most(fields: Fields, chat: bool, where: str, prompts: Sequence[int], length: int) -> tuple[int, ...]:
    """Tokens of an answer, by prompt: of a completion 16 unless asked, in a chat as many as there is room for."""
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    asked = {name: value for name in names if (value := fields.whole(name, 1, length)) is not None}
    if len(set(asked.values())) > 1:
        raise fields.refuse(
            "max_completion_tokens", asked["max_completion_tokens"], f"max_tokens, {asked['max_tokens']}, or one of them"
        )
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


def _sampling(fields: Fields, chat: bool) -> Sampling:
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


def _below_one(fields: Fields, name: str) -> float:
    value = fields.number(name, 0.0, 0, 1)
    if value == 1:
        raise fields.refuse(name, value, "a number below 1")
    return value


def _logprobs(fields: Fields, chat: bool) -> int | None:
    if not chat:
        return fields.whole("logprobs", 0, LOGPROBS)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, LOGPROBS)
    if top is not None and not wanted:
        raise fields.refuse("top_logprobs", top, "none without logprobs: true")
    return (top or 0) if wanted else None


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.take("stop")
    stops = [] if given is None else given if isinstance(given, list) else [given]
    if len(stops) > STOPS or not all(is_text(stop) and 1 <= len(stop) <= STOP_LENGTH for stop in stops):
        raise fields.refuse("stop", given, f"at most {STOPS} texts of 1 to {STOP_LENGTH} characters")
    return tuple(stops)


def _usage(fields: Fields, stream: bool) -> bool:
    options = fields.inside("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.refuse("stream_options", {}, "none without stream: true")
    wanted = options.flag("include_usage")
    options.close(frozenset({"include_obfuscation"}))
    return wanted


def _grammar(fields: Fields) -> str | None:
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


def _schema(described: Fields) -> dict[str, Any]:
    wrapped = described.inside("json_schema")
    if wrapped is None:
        raise described.refuse("json_schema", None, "an object with a schema")
    schema = wrapped.take("schema")
    if not isinstance(schema, dict):
        raise wrapped.refuse("schema", schema, "a JSON schema, as an object")
    wrapped.close(frozenset({"name", "description", "strict"}))  # every schema is kept strictly
    return schema
