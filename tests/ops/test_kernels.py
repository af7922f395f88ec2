"""The battery on the Triton kernels, in Triton's interpreter: TRITON_INTERPRET=1 pytest.

The interpreter takes milliseconds a program, so every rule has the checks of its mathematics, and one rule of each engine those of
what its rules share: sequences, states, packing, registration; CARVE, LUCID, PaTH and Polar have tests of their own. Sizes are as small as
still cut a chunk. Of the battery is left out: literal_form_is_the_recurrence, where no kernel runs; chunk_size_is_invisible, since the
kernels' chunk is their config's; half precision in error_budget, which `needlework doctor` judges on a GPU, on more numbers.
"""

import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.specs import specs
from needlework.testing import checks
from needlework.testing.compare import assert_close, leaves, make, whole
from needlework.testing.targets import RULES

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

MATHEMATICS = (checks.chunk_is_the_recurrence, checks.gradients, checks.limits)
SPLIT = partial(checks.split_then_resume, T=37, cuts=(1, 16, 23))
BUDGET = partial(checks.error_budget, dtypes=(torch.float32,), B=3, T=35)
# of 105 numbers an angle Mamba-3's dangle was at 0.5 to 1.26 of its budget by the seed, on one CPU; of these 512 at 0.4 to 0.53
MORE = partial(checks.error_budget, dtypes=(torch.float32,), B=8, T=64)
CAUSAL = partial(checks.causal, T=19)
SHARED = (
    SPLIT,
    checks.step_is_prefill,
    CAUSAL,
    BUDGET,
    checks.packed_is_separate,
    checks.batch_invariant,
    checks.compiles_without_a_graph_break,
    checks.custom_ops_pass_opcheck,
    checks.outputs_are_complete_when_memory_is_poisoned,
    partial(checks.odd_lengths, lengths=(1, 37, 63)),
    checks.no_tokens,
)
ONE_ROW = (*MATHEMATICS, SPLIT)  # two rows cost twice as much: batches are batch_invariant's
# of each engine, the rule with the most arguments
REPRESENTATIVES = ("qdelta/grouped", "delta/grouped", "delta/gdn2", "ccq/aligned", "mamba3")
# Left to the slow run: what needs no second representative, and of the costly checks those that the engine's own tests have as well
SLOW = {
    "qdelta/grouped": (
        CAUSAL,
        checks.packed_is_separate,
        checks.compiles_without_a_graph_break,
        checks.custom_ops_pass_opcheck,
    ),
    "delta/grouped": (CAUSAL, checks.compiles_without_a_graph_break, checks.custom_ops_pass_opcheck),
    "ccq/aligned": (CAUSAL, BUDGET, checks.compiles_without_a_graph_break, checks.custom_ops_pass_opcheck),
    "mamba3": SHARED,  # test_triton_mamba3.py has them in small
}
ENGINES = {rule.spec: rule.chunk for rule in RULES if rule.step and not rule.spec.startswith(("lucid", "path", "polar"))}
CASES = [(spec, check) for spec in specs() if spec.name in ENGINES for check in MATHEMATICS] + [
    pytest.param(
        spec,
        MORE if (spec.name, check) == ("mamba3", BUDGET) else check,
        marks=pytest.mark.slow if check in SLOW.get(spec.name, ()) else (),
    )
    for spec in specs()
    if spec.name in REPRESENTATIVES
    for check in SHARED
    if (spec.name, check) != ("delta/grouped", BUDGET)  # of a hundred gates few are large: test_triton_additive.py has more
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Also where a check calls a function of the op's own: limits, steps."""
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")


def name(case) -> str:
    return getattr(case, "name", None) or getattr(case, "func", case).__name__


@pytest.mark.parametrize(("spec", "check"), CASES, ids=name)
def test_battery(spec, check):
    # impl="triton" raises where "auto" would quietly take torch
    spec = dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"))
    if check in ONE_ROW:
        spec = dataclasses.replace(spec, inputs=lambda generator, B, T, style, make=spec.inputs: make(generator, 1, T, style))
    check(spec)


def test_every_engine_that_an_op_takes_has_its_representative():
    assert {ENGINES[spec] for spec in REPRESENTATIVES} == set(ENGINES.values())


def test_rows_that_fill_no_content_chunk_are_each_computed():
    spec = next(spec for spec in specs() if spec.name == "carve")
    inputs = make(spec, 3, 5)
    got, want = (dict(leaves(whole(chunk)(inputs))) for chunk in (partial(spec.chunk, impl="triton"), spec.recurrent))
    assert_close(got, want, "three rows of one content chunk")
