"""A source's config.json, key by key: what a layout takes has its type, what needlework has no layer for is refused, and so is a key
that were not read."""

from typing import Any

from transformers import PreTrainedConfig

from needlework.fields import Natural, fitted
from needlework.layers.config import nearest
from needlework.models.config import THEIRS

REQUIRED = object()
# what transformers writes beside a model's own fields, and what says how a training or a cache is run
PASSED_OVER = THEIRS | PreTrainedConfig().to_dict().keys() | {"initializer_range", "max_position_embeddings", "use_cache"}


class Described:
    """The keys of a config. where: the file, for errors."""

    def __init__(self, values: dict[str, Any], where: str):
        self.where = where
        self._values, self._taken = _decoded(values), set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def values(self) -> dict[str, Any]:
        """All of it, for a class that reads it in its own way."""
        return dict(self._values)

    def take(self, name: str, kind: Any, default: Any = REQUIRED) -> Any:
        """The value as the type `kind` has it; ValueError for another one, and for a key that is missing and has no default."""
        self._taken.add(name)
        if name not in self._values:
            if default is REQUIRED:
                raise ValueError(f"{self.where}: {name} is missing")
            return default
        return fitted(self.where, name, self._values[name], kind)

    def only(self, **allowed: tuple[Any, ...]) -> None:
        """ValueError for a key that is there with another value than those of `allowed`, which needlework's layers have."""
        for name, values in allowed.items():
            self._taken.add(name)
            if name in self._values and self._values[name] not in values:
                raise ValueError(
                    f"{self.where}: {name} is {self._values[name]!r}, which no layer of needlework has; expected "
                    f"{' or '.join(map(repr, values))}"
                )

    def ignore(self, *names: str) -> None:
        """Keys that change no logit."""
        self._taken |= {*names}

    def tokens(self) -> dict[str, Any]:
        """The ids of tokens that begin, end and pad, one of each: where several end a text, generation_config.json has them all."""
        found = {}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            given = self.take(name, Natural | int | tuple[Natural, ...] | None, None)
            first = given[0] if isinstance(given, tuple) else given
            found[name] = None if first is None or first < 0 else first
        return found

    def finish(self) -> None:
        """ValueError for keys that no layout took and transformers does not write by itself."""
        left = [name for name in self._values if name not in self._taken | PASSED_OVER and not name.startswith("_")]
        if left:
            known, others = sorted(self._taken), ", ".join(left[1:])
            raise ValueError(
                f"{self.where}: unknown key {left[0]!r}{nearest(left[0], known)}{f', also {others}' if others else ''}; "
                f"known: {', '.join(known)}"
            )


def filled(described: Described, kind: type[PreTrainedConfig]) -> Described:
    """The config with transformers' defaults, old spellings of rotary positions read by transformers itself. Its keys are asked for here
    alone from then on."""
    described.ignore(*described.values())
    return Described(kind(**described.values()).to_dict(), described.where)


def _decoded(value: Any) -> Any:
    """transformers writes a number that JSON has no word for as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        tagged = value.keys() == {"__float__"}
        return float(value["__float__"]) if tagged else {name: _decoded(x) for name, x in value.items()}
    return [_decoded(x) for x in value] if isinstance(value, list) else value
