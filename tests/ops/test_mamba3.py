"""What Mamba-3's page claims and the battery does not ask: the unrotated state, the bits before a token, long sums of angles, bad input."""

import math
import re

import pytest
import torch

from needlework.ops.mamba3 import chunk_mamba3, recurrent_mamba3, reference
from needlework.ops.mamba3.arguments import Mamba3Inputs, checked
from needlework.ops.mamba3.spec import SPECS, sample
from needlework.testing.compare import assert_close, make, tokens
from needlework.testing.errors import assert_within_budget, over_budget

OPTIONAL = ("q_bias", "k_bias", "mimo_x")


@pytest.mark.parametrize("pairs", ["even", "halves"])
@pytest.mark.parametrize("R", [None, 3])
def test_in_the_input_s_frame_it_is_a_complex_diagonal_state(pairs, R):
    inputs = sample(torch.Generator().manual_seed(0), 2, 37, "random", R=R)
    rule = checked(Mamba3Inputs(**dict.fromkeys(OPTIONAL) | inputs), pairs)
    o = reference.unrotated(rule, pairs=pairs)
    got = chunk_mamba3(**inputs, pairs=pairs).o
    assert_close({"o": got}, {"o": o if R else o.squeeze(3)}, "unrotated")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_later_token_changes_no_bit(spec):
    """Forms that write a token with what the next one says, and take it out of its read again, are causal to rounding alone."""
    inputs, other = make(spec, 1, 83), make(spec, 1, 83, seed=1)
    o = spec.chunk(**inputs).o
    for t in (0, 31, 63, 64):
        mixed = {
            name: torch.cat([x[:, : t + 1], other[name][:, t + 1 :]], 1) if name in spec.tokens else x
            for name, x in inputs.items()
        }
        assert torch.equal(spec.chunk(**mixed).o[:, : t + 1], o[:, : t + 1]), f"token {t}"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_wiped_state_is_never_read_again(spec):
    """Its angle goes on, which no read sees: the token before is wiped too."""
    inputs = make(spec, 1, 83)
    inputs["g"][:, 40] = -torch.inf
    alone = spec.chunk(**tokens(spec, inputs, lambda x: x[:, 40:]))
    assert_close({"o": spec.chunk(**inputs).o[:, 40:]}, {"o": alone.o}, "after the wipe")


def test_the_angle_of_a_long_sequence_is_right_to_float32():
    """A plain float32 sum of a thousand radians errs by 2⁻²⁴ of itself: many times the definition, which stays in [−π, π]."""
    B, T, m, generator = 8, 1000, 4, torch.Generator().manual_seed(0)
    x = {name: torch.randn(B, T, 1, 2 * m, generator=generator) for name in ("q", "k", "v")}
    x |= {name: torch.rand(B, T, 1, generator=generator) for name in ("dt", "lam")}
    x |= {"g": -x["dt"], "angle": 0.5 + torch.randn(B, T, m, generator=generator)}
    wide = {name: y.double() for name, y in x.items()}
    fast, exact, definition = (
        {"angle": form(**given, output_final_state=True).state.angle}
        for form, given in ((chunk_mamba3, x), (recurrent_mamba3, wide), (recurrent_mamba3, x))
    )
    plain = (math.pi * x["angle"].tanh()[:, :, None] * x["dt"][..., None]).cumsum(1)[:, -1]
    assert plain.abs().max() > 400
    plain = {"angle": torch.remainder(plain.double() + math.pi, 2 * math.pi).float() - math.pi}
    assert_within_budget(over_budget(fast, exact, definition, definition))
    assert over_budget(plain, exact, definition, definition)["angle"] > 1


WRONG = {
    "pairs: got 'odd', expected 'even' or 'halves'": lambda x: {"pairs": "odd"},
    "q: the last axis (K) has size 11, expected an even number": lambda x: {n: x[n][..., :11] for n in ("q", "k")},
    "angle: axis 2 (m) of [B T m] has size 7, expected at most K / 2 = 6": lambda x: {"angle": torch.zeros(1, 5, 7)},
    "v: axis 2 (HV) has size 2, expected a multiple of the 3 key heads": lambda x: {
        n: x[n].repeat_interleave(3, 2) for n in ("q", "k")
    },
    "q: axis 3 (R) of [B T H R K] has size 0, expected at least 1": lambda x: {n: x[n][..., None, :][..., :0, :] for n in ("q", "k")},
    "q_bias: axis 0 (HV) of [HV K] has size 1, expected 2": lambda x: {"q_bias": x["q_bias"][:1]},
    "mimo_x: got a tensor [2, 1, 6], expected none": lambda x: {"mimo_x": torch.ones(2, 1, 6)},
    "initial_state.angle: axis 2 (m)": lambda x: {"initial_state": SPECS[0].table(1)._replace(angle=torch.zeros(1, 2, 3))},
    "initial_state.k: axis 2 (R)": lambda x: {"initial_state": SPECS[1].table(1)},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    inputs = make(SPECS[0], 1, 5)
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_mamba3(**inputs | WRONG[message](inputs))
