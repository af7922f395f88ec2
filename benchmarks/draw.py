"""Calls for `grid.py`, drawn by seed: the same ones wherever they are drawn. Imports no torch.

Sizes of heads, dtypes, groups, packing and initial states are dealt from shuffled decks, tokens and heads from logarithmic strata, so that
every draw of a rule covers its ranges. Each call is drawn apart from all others.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import NamedTuple

KEYS = (32, 48, 64, 68, 80, 96, 112, 128, 160, 192, 256)
VALUES = (*KEYS, 320, 384, 512)
TOKENS = (2048, 262144)  # of all rows together
HEADS = (1, 64)  # that have values of their own, or queries in attention
GROUPS = (1, 1, 1, 2, 4, 8)
CONTENT = (32, 64, 128)  # tokens of CARVE's content chunk
SHORTEST = 16  # tokens of a packed document
CALLS = 40  # of a rule

# Launch configs are made on calls of the first seeds, tried on those of the second and reported on those of the third. A review draws with a
# seed of its own. 101 was the first to be reported; since then configs have been chosen on some of its calls too, so that it reports no more.
TUNING = (11, 12, 13)
HELD_OUT = 21
REPORTING = (102, 103, 104)

MEMORY = 70 * 2**30  # bytes that a call may take, beside its peer
OPERATIONS = 5e13  # of an attention's forward pass: a tenth of a second at the rate of a large product


class Rule(NamedTuple):
    """What a draw needs to know of a rule. `widest`: largest K and V of its kernels; `values`: whether it has values of a size of their own;
    `grouped`: whether value heads may share a key head; `state`: whether a call may start from one of fixed size;
    `attends`: whether its work grows with the square of a document; `content`: whether it has content chunks; `channel`: bytes of a forward
    and backward pass for a token and channel."""

    name: str
    widest: tuple[int, int]
    values: bool = True
    grouped: bool = True
    state: bool = True
    attends: bool = False
    content: bool = False
    channel: int = 48


RULES = (
    Rule("gated", (256, 512)),
    Rule("qdelta", (256, 512)),
    Rule("additive", (256, 512)),
    Rule("gla", (256, 512), channel=64),
    Rule("kda", (256, 512), channel=64),
    Rule("gdn2", (256, 512), channel=72),
    Rule("given", (256, 512), channel=72),
    Rule("carve-gates-given", (256, 512), channel=64),
    Rule("carve", (256, 512), grouped=False, content=True, channel=72),
    Rule("ccq", (256, 256), values=False),
    Rule("mamba3", (256, 512)),
    Rule("lucid", (256, 256), grouped=False, state=False, attends=True),
    Rule("lucid/attention", (256, 256), state=False, attends=True),
    Rule("polar", (256, 256), state=False, attends=True),
    Rule("path", (128, 128), state=False, attends=True, channel=64),
    Rule("path/fox", (128, 128), state=False, attends=True, channel=64),
    Rule("path/lucid", (128, 128), grouped=False, state=False, attends=True, channel=72),
)


class Call(NamedTuple):
    """B rows of T tokens, or B = 1 with packed `documents` of so many tokens each. H: heads of keys (key-value heads in attention); HV: of values
    (of queries in attention). `state`: it starts from one. `content`: tokens of a content chunk, 0 of rules that have none."""

    rule: str
    seed: int
    index: int
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    dtype: str
    documents: tuple[int, ...] = ()
    state: bool = False
    content: int = 0

    @classmethod
    def of(cls, facts: dict) -> "Call":
        """From what JSON keeps of it."""
        return cls(**facts | {"documents": tuple(facts["documents"])})

    @property
    def sequences(self) -> tuple[int, ...]:
        """Tokens of each."""
        return self.documents or (self.T,) * self.B

    @property
    def shape(self) -> dict[str, int]:
        """What a row of results says of it."""
        sizes = {name: getattr(self, name) for name in ("B", "T", "H", "HV", "K", "V")}
        return sizes | {"documents": len(self.documents), "state": int(self.state), "content": self.content}

    @property
    def name(self) -> str:
        return f"{self.rule}/{self.seed}-{self.index}"

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph can hold it: the host reads the lengths of packed documents, and how far CARVE's states are into a content
        chunk."""
        return not self.documents and not (self.content and self.state)

    def packed(self) -> list[int] | None:
        """cu_seqlens."""
        return list(accumulate(self.documents, initial=0)) if self.documents else None


def rule_of(name: str) -> Rule:
    return next(rule for rule in RULES if rule.name == name)


def memory(call: Call) -> int:
    """Bytes that a forward and backward pass takes at most, inputs, gradients and the copy in a graph's pool included: an estimate."""
    tokens, states = call.B * call.T * call.HV * (call.K + call.V), len(call.sequences) * call.HV * call.K * call.V
    return rule_of(call.rule).channel * tokens + (16 * states if call.state else 0)


def operations(call: Call) -> float:
    """Of a forward pass's products over pairs of tokens."""
    if not rule_of(call.rule).attends:
        return 0.0
    return float(sum(n * n for n in call.sequences) * call.HV * (call.K + call.V))


def too_large(call: Call) -> str | None:
    """Why a call is left out, None if it is not."""
    if memory(call) > MEMORY:
        return f"takes about {memory(call) / 2**30:,.0f} GiB, more than {MEMORY / 2**30:.0f}"
    if operations(call) > OPERATIONS:
        return f"takes {operations(call):.1e} operations forward, more than {OPERATIONS:.0e}"
    return None


def draw(
    rule: Rule, seed: int, count: int = CALLS, *, tokens: tuple[int, int] = TOKENS, heads: tuple[int, int] = HEADS
) -> tuple[list[Call], dict[Call, str]]:
    """`count` calls that fit, and why the others that were drawn on the way are left out."""
    random = Random(f"{rule.name} {seed}")
    calls: list[Call] = []
    left_out: dict[Call, str] = {}
    while len(calls) < count:
        for call in _round(rule, seed, len(calls) + len(left_out), count, random, tokens, heads):
            if reason := too_large(call):
                left_out[call] = reason
            elif len(calls) < count:
                calls.append(call)
    return calls, left_out


def drawn(seed: int, rules: tuple[Rule, ...] = RULES, count: int = CALLS) -> tuple[list[Call], dict[Call, str]]:
    """Of every rule in turn. A rule's calls are in random order, so that as many as a run comes to are a sample of them all."""
    each = [draw(rule, seed, count) for rule in rules]
    return [call for calls in zip(*(calls for calls, _ in each), strict=True) for call in calls], {
        call: reason for _, left_out in each for call, reason in left_out.items()
    }


def _round(
    rule: Rule, seed: int, first: int, count: int, random: Random, tokens: tuple[int, int], heads: tuple[int, int]
) -> Iterator[Call]:
    """`count` calls that cover the ranges."""
    K, V = (
        _deck([size for size in sizes if size <= widest], count, random)
        for sizes, widest in zip((KEYS, VALUES), rule.widest, strict=True)
    )
    dtypes = _deck(["bfloat16", "bfloat16", "float16"], count, random)
    groups = _deck(list(GROUPS) if rule.grouped else [1], count, random)
    states = _deck([False, False, True] if rule.state else [False], count, random)
    layouts = _deck(["ragged", "even", "packed"], count, random)
    same = _deck([False, True] if rule.attends else [False], count, random)  # most attention has keys as wide as values
    totals = _strata(tokens[0], tokens[1], count, random)
    wide = _strata(heads[0], heads[1] + 1, count, random)
    rows = _strata(1, 65, count, random)
    contents = _deck(list(CONTENT), count, random) if rule.content else [0] * count
    for i in range(count):
        G = min(groups[i], heads[1])
        HV = max(G, int(wide[i]) // G * G)
        B, T, documents = _layout(layouts[i], int(totals[i]), int(rows[i]), tokens[0], random)
        values = K[i] if same[i] or not rule.values else V[i]
        sizes = HV // G, HV, K[i], values
        yield Call(rule.name, seed, first + i, B, T, *sizes, dtypes[i], documents, states[i], contents[i])


def _layout(layout: str, total: int, rows: int, least: int, random: Random) -> tuple[int, int, tuple[int, ...]]:
    """Rows, their tokens, and the documents that are packed."""
    if layout == "packed":
        return 1, total, tuple(_documents(total, random))
    T = max(total // rows, 1)
    if layout == "even" and T >= 64:
        T = T // 64 * 64
    while rows * T < least:
        rows += 1
    return rows, T, ()


def _documents(total: int, random: Random) -> Iterator[int]:
    """Lengths, log-uniform up to the whole; the last is what is left."""
    while total > 0:
        length = min(total, int(SHORTEST * max(total / SHORTEST, 1) ** random.random()))
        yield length
        total -= length


def _deck(values: list, count: int, random: Random) -> list:
    """Each value as often as any other, or once more."""
    cards = random.sample(values, len(values))
    dealt = [cards[i % len(cards)] for i in range(count)]
    random.shuffle(dealt)
    return dealt


def _strata(low: int, high: int, count: int, random: Random) -> list[float]:
    """Log-uniform in [low, high), one in each of `count` equal parts."""
    points = [low * (high / low) ** ((i + random.random()) / count) for i in range(count)]
    random.shuffle(points)
    return points
