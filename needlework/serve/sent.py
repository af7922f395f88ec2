"""The fields of a JSON object that a client has sent, taken one by one and checked by hand."""

import json
from collections.abc import Mapping
from typing import Any

from needlework.serve.refused import RefusedError

HARMLESS = frozenset({
    "user", "store", "metadata", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "parallel_tool_calls",
})  # fmt: skip
NEUTRAL = {"best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none",), "modalities": (["text"],)}  # fmt: skip


class Fields:
    """The fields of an object; null counts as absent. `close` refuses those that were not read."""

    def __init__(self, fields: Mapping[str, Any], inside: str = ""):
        self._left = {name: value for name, value in fields.items() if value is not None}
        self._inside = inside

    def name(self, field: str) -> str:
        """As an error shows it: JSON's escapes can write half a character, which no answer can hold."""
        return self._inside + field.encode(errors="backslashreplace").decode()

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def refuse(self, name: str, value: Any, expected: str) -> RefusedError:
        return RefusedError(f"{self.name(name)}: got {shown(value)}, expected {expected}", self.name(name))

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise self.refuse(name, value, "true or false")
        return bool(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not is_text(value):
            raise self.refuse(name, value, "a string of Unicode characters")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is not None and not (is_whole(value) and low <= value <= high):
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

    def inside(self, name: str) -> "Fields | None":
        value = self.take(name)
        if not isinstance(value, dict | None):
            raise self.refuse(name, value, "an object")
        return None if value is None else Fields(value, f"{self.name(name)}.")

    def close(self, harmless: frozenset[str] = HARMLESS) -> None:
        for name, value in self._left.items():
            if name not in harmless and value not in NEUTRAL.get(name, ()):
                expected = " or ".join(map(shown, NEUTRAL.get(name, ()))) or "no such field"
                words = f"{self.name(name)}: got {shown(value)}, expected {expected}: it is not supported here"
                raise RefusedError(words, self.name(name), code="unsupported_parameter")


def shown(value: Any) -> str:
    """As JSON, if that is short."""
    written = json.dumps(value)
    return written if len(written) <= 80 else f"{written[:80]}…"


def is_text(value: Any) -> bool:
    """Whether it is a string that has UTF-8: JSON's escapes can write half a character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
