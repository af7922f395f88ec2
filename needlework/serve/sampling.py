"""The next token of every row of a batch, on the device: penalties, grammar, temperature, top-k, top-p, min-p, a seed a request.

    x ← penalties(logits),    x ← −∞ where the grammar forbids,    p = softmax(x / temperature) over what the filters keep
    token = argmax( x / temperature + Gumbel(seed, counter, token) )        a draw from p;  temperature 0: argmax x

The noise is a hash of the request's seed, of how many tokens it has drawn, and of the token's number: a request draws the same in any
batch, in any slot, and after it was parked or computed again. Nothing is read back, and every shape follows from the batch's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORBIDDEN = float("-inf")


class Controls(NamedTuple):
    """What each row asks for, [R] each, on the device; the table rows that its penalties count in.

    temperature: 0 is greedy. top_k: at least 1; the vocabulary's size keeps all. top_p: 1 keeps all. min_p: 0 keeps all. seed, counter:
    int64. presence, frequency: subtracted once, and for each time that a token was drawn. repetition: divides what is above 0 and
    multiplies what is below, of tokens that were drawn or are in the prompt; 1 changes nothing. slots: int64 rows of the counts,
    −1 for a padded row.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    counter: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    slots: Tensor


class Counts(NamedTuple):
    """drawn [slots V] int32: how often a request drew each token; prompt [slots V] bool: which its prompt has."""

    drawn: Tensor
    prompt: Tensor

    @classmethod
    def zeros(cls, slots: int, V: int, device: torch.device | str = "cpu") -> "Counts":
        made = lambda dtype: torch.zeros(slots, V, dtype=dtype, device=device)
        return cls(made(torch.int32), made(torch.bool))  # of a long answer a token may be drawn more often than int16 counts

    @staticmethod
    def nbytes(V: int) -> int:
        """Of a slot."""
        return V * (torch.int32.itemsize + torch.bool.itemsize)

    def add(self, tokens: Tensor, slots: Tensor) -> None:
        """One more of tokens [R], in place; a padded row (slot −1) adds nothing."""
        ones = (slots >= 0).to(self.drawn.dtype)
        self.drawn.index_put_((slots.clamp(min=0), tokens), ones, accumulate=True)


def penalised(logits: Tensor, controls: Controls, counts: Counts) -> Tensor:
    """logits [R V] less what each row's penalties take off."""
    slots = controls.slots.clamp(min=0)
    drawn, prompt = counts.drawn[slots], counts.prompt[slots]
    by = lambda x: x[:, None]
    scaled = torch.where(logits > 0, logits / by(controls.repetition), logits * by(controls.repetition))
    logits = torch.where((drawn > 0) | prompt, scaled, logits)
    return logits - by(controls.frequency) * drawn - by(controls.presence) * (drawn > 0)


def allowed(logits: Tensor, bits: Tensor) -> Tensor:
    """logits [R V], −∞ where a row's bitmask [R ⌈V/32⌉] int32 has no bit for the token."""
    token = torch.arange(logits.shape[1], device=logits.device)
    return logits.where((bits[:, token // 32] >> (token % 32)) & 1 != 0, FORBIDDEN)


def filtered(x: Tensor, controls: Controls) -> Tensor:
    """x [R V], logits over temperature: −∞ outside the top_k largest, outside the fewest whose mass reaches top_p, below min_p · the
    largest mass. A tie with the last that is kept is kept; the largest is always kept."""
    down, _ = x.sort(dim=-1, descending=True)
    mass = down.softmax(-1)
    place = torch.arange(x.shape[1], device=x.device)
    kept = (place < controls.top_k[:, None]) & (mass.cumsum(-1) - mass < controls.top_p[:, None])
    kept &= mass >= controls.min_p[:, None] * mass[:, :1]
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    return x.where(x >= down.gather(-1, last), FORBIDDEN)


PARTS = 16  # that a row's maximum is looked for in side by side


def likeliest(x: Tensor) -> Tensor:
    """The first largest of each row of x [R V], [R]: of few rows one maximum after the other would leave most of a GPU idle."""
    if x.shape[1] % PARTS:
        return x.argmax(-1)
    parts = x.unflatten(1, (PARTS, -1))
    at, part = parts.argmax(-1), parts.amax(-1).argmax(-1, keepdim=True)
    return (part * parts.shape[2] + at.gather(1, part))[:, 0]


def drawn(x: Tensor, controls: Controls) -> Tensor:
    """One token [R] of softmax(x) of each row; x [R V]."""
    return likeliest(x + _gumbel(controls, x.shape[1]))


def sample(
    logits: Tensor,
    controls: Controls,
    *,
    counts: Counts | None = None,
    bits: Tensor | None = None,
    draws: bool = True,
    filters: bool = True,
) -> Tensor:
    """The next token [R] of logits [R V]. counts None: no row has penalties. bits None: no row has a grammar. draws: whether any row has a
    temperature; the noise of all rows costs more than the logits. filters: whether any row asks for top_k, top_p or min_p."""
    x = logits.float()
    if counts is not None:
        x = penalised(x, controls, counts)
    if bits is not None:
        x = allowed(x, bits)
    if not draws:
        return likeliest(x)
    greedy = controls.temperature == 0
    warm = x / torch.where(greedy, 1.0, controls.temperature)[:, None]
    if filters:
        warm = filtered(warm, controls)
    return torch.where(greedy, likeliest(x), drawn(warm, controls))


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the model's own distribution, before penalties and temperature: log p of tokens [R], and the `top` likeliest tokens [R top] with
    theirs."""
    log_p = logits.float().log_softmax(-1)
    best, which = log_p.topk(top, -1)
    return log_p.gather(-1, tokens[:, None])[:, 0], which, best


def _gumbel(controls: Controls, V: int) -> Tensor:
    """−ln(−ln u) [R V], u uniform in (0, 1) by a hash of seed, counter and token."""
    token = torch.arange(V, device=controls.seed.device)
    key = _mixed(controls.seed ^ _mixed(controls.counter + _ODD))
    # of key + odd · (token + 1), written so that no product is of a token alone: torch.compile would make that one in 32 bits.
    # 24 bits, as many as float32 holds, and a half: never 0 or 1
    u = ((_mixed(((key * _INVERSE)[:, None] + token + 1) * _ODD) >> 40 & 0xFFFFFF).float() + 0.5) / 2**24
    return -(-u.log()).log()


_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 over the golden ratio
_INVERSE = -1018231460777725123  # _ODD · _INVERSE = 1 modulo 2^64


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every bit of an int64 depends on every other. Products wrap; shifts are made logical."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
        x = (x ^ (x >> shift & (1 << (64 - shift)) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)
