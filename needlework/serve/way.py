"""What of sampling a step needs: what no row asks for is left out, and one CUDA graph does one way."""

from typing import NamedTuple

from needlework.serve.request import Sampling


class Way(NamedTuple):
    """Whether any row draws by temperature; filters by top_k, top_p or min_p; has penalties, logprobs, a grammar."""

    draws: bool
    filters: bool
    penalties: bool
    logprobs: bool
    grammar: bool

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for but a draw."""
        return not (self.filters or self.penalties or self.logprobs or self.grammar)

    @classmethod
    def of(cls, bits: int, grammar: bool) -> "Way":
        """bits: `wanted` of all rows, or-ed."""
        return cls(bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8), grammar)


def wanted(asked: Sampling) -> int:
    """A bit for each of draws, filters, penalties and logprobs."""
    draws = asked.temperature > 0
    return draws | filters(asked) << 1 | penalties(asked) << 2 | (asked.logprobs is not None) << 3


def filters(asked: Sampling) -> bool:
    return asked.temperature > 0 and (asked.top_k > 0 or asked.top_p < 1 or asked.min_p > 0)


def penalties(asked: Sampling) -> bool:
    return asked.presence_penalty != 0 or asked.frequency_penalty != 0 or asked.repetition_penalty != 1
