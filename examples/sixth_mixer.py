"""A mixer of your own: a write rule in thirty lines, beside ours.

You learn: a write rule is a frozen config with a `kind` and a module that names its two ops and whose `call` gives either q, k, v, the
gate g and the query that reads. `Recurrent` does the rest: projections, convolution, norm, output gate, state, packing. The rule composes
with every gate and every read rule. The rule here has one gate for forgetting and for writing, as a GRU has:

    S_t = e^g (I − β k kᵀ) S_{t-1} + β k vᵀ,   β = 1 − e^g

It needs no new kernel, since it is a row of the delta family. docs/tutorials/a_sixth_mixer.md adds a rule to the library, with an op of
its own.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from needlework.layers import CCQ, Recurrent, ScalarGate
from needlework.layers.config import Width
from needlework.layers.gates import GateConfig
from needlework.layers.write import WriteConfig, WriteRule
from needlework.ops.delta import chunk_delta, step_delta


@dataclass(frozen=True, kw_only=True)
class Coupled(WriteConfig):
    """S_t = e^g (I − β k kᵀ) S_{t-1} + β k vᵀ with β = 1 − e^g."""

    kind = "coupled"
    gate: GateConfig = field(default_factory=lambda: ScalarGate(half_life=2.0))

    def build(self, width: Width) -> nn.Module:
        return CoupledRule(self, width)


class CoupledRule(WriteRule):
    chunk, step = staticmethod(chunk_delta), staticmethod(step_delta)  # many tokens, and one while serving

    def call(self, op, q, k, v, *, g, q_read):
        """q, k [B T H K] of unit norm, v [B T HV V], g [B T HV] <= 0; the op has its states already."""
        return op(q, k, v, g, -torch.expm1(g), q_read=q_read, scale=self.width.scale)


def by_hand(k, v, g):
    """The state after the last token, from the equation: k [T K], v [T V], g [T]."""
    S = k.new_zeros(k.shape[1], v.shape[1])
    for k_t, v_t, g_t in zip(k, v, g, strict=True):
        beta = 1 - g_t.exp()
        S = g_t.exp() * (S - beta * torch.outer(k_t, k_t @ S)) + beta * torch.outer(k_t, v_t)
    return S


def main() -> None:
    torch.manual_seed(0)
    k, v, g = torch.randn(1, 20, 1, 8), torch.randn(1, 20, 1, 8), -torch.rand(1, 20, 1)
    k = nn.functional.normalize(k, dim=-1)
    rule = Coupled().build(Width(dim=32, heads=1, value_heads=1, key_dim=8, value_dim=8))
    state = rule(partial(rule.chunk, output_final_state=True), k, k, v, g=g, q_read=k)[1]
    torch.testing.assert_close(state[0, 0], by_hand(k[0, :, 0], v[0, :, 0], g[0, :, 0]), rtol=1e-4, atol=1e-5)
    print("the rule is its equation")

    mixer = Recurrent(heads=2, key_dim=16, value_dim=16, write=Coupled(), read=CCQ()).build(dim=32)
    x = torch.randn(2, 24, 32)
    y, _ = mixer(x)
    start, state = mixer(x[:, :10], output_final_state=True)
    rest, _ = mixer(x[:, 10:], state)
    torch.testing.assert_close(torch.cat([start, rest], 1), y, rtol=1e-4, atol=1e-5)
    print(f"under CCQ's read, cut and resumed; {mixer.state_size(1000, torch.float32):,} bytes of state at any length")

    optimizer, target, losses = torch.optim.AdamW(mixer.parameters(), lr=1e-2), x.roll(2, 1), []
    for _ in range(60):  # say what came two tokens ago
        loss = (mixer(x)[0] - target)[:, 2:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"it learns: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
