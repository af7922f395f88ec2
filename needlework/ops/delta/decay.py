"""Decay between the tokens of a chunk, for both gate widths: factors, couplings, and their gradients.

    M_ts = Σ_c a_tc k_sc e^{G_t − G_s},  s <= t        G_t = g_1 + … + g_t, per head or per channel

Every exponent is the sum of the gates between two tokens, accurate to its own size and never above 0 for g <= 0, −∞ included; dg
sums only terms that hold e^{g} ("dg without cancellation"). The recurrence, the solve and the state are `chunk.py`'s.
Layout: g [... C 1] or [... C K]; rows a [... C A K] and keys [... C R K], A and R rows a token; M [... C·A C·R].
"""

import torch
from torch import Tensor

from needlework.ops.common.decay import NOTHING, sums_between


def decay_of(g: Tensor) -> "ScalarDecay | ChannelDecay":
    """The decay of a chunk by its gate's width."""
    return ScalarDecay(g) if g.shape[-1] == 1 else ChannelDecay(g)


class ScalarDecay:
    """One gate per head: e^{G_t − G_s} leaves the dot product. from_start e^{G_t} and to_end e^{G_C − G_t}, [... C 1]."""

    def __init__(self, g: Tensor):
        C = g.shape[-2]
        self.lower = torch.ones(C, C, dtype=g.dtype, device=g.device).tril()
        self.between = sums_between(g[..., 0]).to(g.dtype).exp()  # [... C C]
        self.from_start, self.to_end = g.double().cumsum(-2).to(g.dtype).exp(), self.between[..., -1, :, None]

    def couple(self, rows: Tensor, keys: Tensor) -> Tensor:
        A, R = rows.shape[-2], keys.shape[-2]
        return self._tokens(rows.flatten(-3, -2) @ keys.flatten(-3, -2).mT, A, R, self.between)

    def couple_backward(self, dM: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows, keys and g."""
        A, R = rows.shape[-2], keys.shape[-2]
        a, k = rows.flatten(-3, -2), keys.flatten(-3, -2)
        dM = self._tokens(dM, A, R, self.between)
        pairs = (dM * (a @ k.mT)).unflatten(-2, (-1, A)).unflatten(-1, (-1, R)).sum((-3, -1))  # [... C C]: dM_ts M_ts
        # dg_τ sums the pairs t >= τ > s
        dg = ((self.lower.mT @ pairs) * self.lower.tril(-1)).sum(-1, keepdim=True)
        return (dM @ k).view_as(rows), (dM.mT @ a).view_as(keys), dg

    def factors_backward(self, dstart: Tensor, dend: Tensor, dwhole: Tensor) -> Tensor:
        """dg from the gradients of the logarithms of from_start, to_end [... C K] and of e^{G_C} [... K]."""
        dstart, dend, dwhole = (x.sum(-1, keepdim=True) for x in (dstart, dend, dwhole))
        return self.lower.mT @ dstart + self.lower.tril(-1) @ dend + dwhole[..., None, :]

    @staticmethod
    def _tokens(M: Tensor, A: int, R: int, factor: Tensor) -> Tensor:
        """M [... C·A C·R] times a factor [... C C] of its tokens."""
        by_token = M.unflatten(-2, (-1, A)).unflatten(-1, (-1, R)) * factor[..., :, None, :, None]
        return by_token.flatten(-4, -3).flatten(-2, -1)


class ChannelDecay:
    """One gate per channel, by dyadic references: no C×C×K tensor, no clamp, right for any gate.

    At level h = 1, 2, 4, … the pairs with t in the second and s in the first half of a block of 2h tokens refer both factors
    to the first half's end: e^{g_{ref+1} + … + g_t} and e^{g_{s+1} + … + g_ref}, each a sum of its own gates. All exponents
    are one 0/1 matrix times g, so dg is its transpose times their gradients. C must be a power of two.
    """

    def __init__(self, g: Tensor):
        C = g.shape[-2]
        self.halves = [2**i for i in range(C.bit_length() - 1)]
        token = torch.arange(C, device=g.device)
        half = token // torch.tensor([*self.halves, C, C], device=g.device)[:, None]  # [L+2 C] the half each token lies in
        second = half % 2 == 1
        second[-2] = True  # the last two levels are the whole chunk: from its start, and to its end
        upto = token[:, None] >= token
        own = torch.where(second[..., None], upto, ~upto) & (half[:, :, None] == half[:, None, :])
        self.own = own.flatten(0, 1).to(g.dtype)  # [(L+2)·C C] which gates a token's exponent sums
        # 0 times −∞ would be no number
        *self.levels, self.from_start, self.to_end = (self.own @ g.clamp(min=NOTHING)).exp().unflatten(-2, (-1, C)).unbind(-3)

    def couple(self, rows: Tensor, keys: Tensor) -> Tensor:
        (C, A), R = rows.shape[-3:-1], keys.shape[-2]
        M = rows.new_zeros(*rows.shape[:-3], C * A, C * R)
        for h, factor in zip(self.halves, self.levels, strict=True):
            row_factor, key_factor = (_half(factor[..., None, :], h, i) for i in (1, 0))
            a, k = _half(rows, h, 1) * row_factor, _half(keys, h, 0) * key_factor
            _pairs(M, h, A, R).copy_(a.flatten(-3, -2) @ k.flatten(-3, -2).mT)
        _same_token(M, A, R).copy_(rows @ keys.mT)
        return M

    def couple_backward(self, dM: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows, keys and g."""
        A, R = rows.shape[-2], keys.shape[-2]
        same = _same_token(dM, A, R)
        drows, dkeys = same @ keys, same.mT @ rows
        dexponents = []
        for h, factor in zip(self.halves, self.levels, strict=True):
            row_factor, key_factor = (_half(factor[..., None, :], h, i) for i in (1, 0))
            a, k = _half(rows, h, 1) * row_factor, _half(keys, h, 0) * key_factor
            block = _pairs(dM, h, A, R)
            da = (block @ k.flatten(-3, -2)).view_as(a)
            dk = (block.mT @ a.flatten(-3, -2)).view_as(k)
            _half(drows, h, 1).addcmul_(da, row_factor)
            _half(dkeys, h, 0).addcmul_(dk, key_factor)
            # a token is a key in the first half and a row in the second
            dexponents.append(torch.stack([(k * dk).sum(-2), (a * da).sum(-2)], -3).flatten(-4, -2))
        if not dexponents:
            return drows, dkeys, torch.zeros_like(self.from_start)
        dexponents = torch.cat(dexponents, -2)
        return drows, dkeys, self.own[: dexponents.shape[-2]].mT @ dexponents

    def factors_backward(self, dstart: Tensor, dend: Tensor, dwhole: Tensor) -> Tensor:
        """dg from the gradients of the logarithms of from_start, to_end [... C K] and of e^{G_C} [... K]."""
        C = dstart.shape[-2]
        return self.own[-2 * C :].mT @ torch.cat([dstart, dend], -2) + dwhole[..., None, :]


def _half(x: Tensor, h: int, which: int) -> Tensor:
    """[... C R K] -> [... C/2h h R K]: the first or second half of every block of 2h tokens."""
    return x.unflatten(-3, (-1, 2, h)).select(-4, which)


def _pairs(M: Tensor, h: int, A: int, R: int) -> Tensor:
    """M [... C·A C·R] -> [... C/2h h·A h·R]: second-half rows against first-half keys, block by block."""
    blocks = M.unflatten(-1, (-1, 2, h * R)).unflatten(-4, (-1, 2, h * A))[..., 1, :, :, 0, :]  # [... n h·A n h·R]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _same_token(M: Tensor, A: int, R: int) -> Tensor:
    """M [... C·A C·R] -> [... C A R]: the rows of a token against its own keys."""
    return M.unflatten(-1, (-1, R)).unflatten(-3, (-1, A)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
