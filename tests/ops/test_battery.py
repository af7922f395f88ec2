"""Every spec times every check of the battery; a check that a definition rules out is skipped with the spec's own reason.

Quick are all of them but two that cost more than the others together: compilation and half precision, for one spec of each op.
"""

from functools import partial

import pytest
import torch

from needlework.ops.specs import specs
from needlework.testing import checks
from needlework.testing.slots import takes_slots

# the spec of each op with the most arguments, of those whose definition is not slow
REPRESENTATIVES = (
    "delta/gdn2",
    "qdelta/transposed",
    "carve",
    "ccq/aligned",
    "lucid/rowmax-window",
    "polar/window",
    "polar/grouped",
    "path/window",
    "paged/polar",
    "mamba3/mimo",
)
ENOUGH = {"B": 47, "T": 88}  # 4,096 numbers a head even for a gate, in a chunk of 64 and a piece of one
# 1,056: two norms of equal errors are within a tenth of each other, where the budget is twice the larger
FEW = {"B": 12, "T": 88}
HALVES = [partial(checks.error_budget, dtypes=(dtype,), **ENOUGH) for dtype in (torch.float16, torch.bfloat16)]
COSTLY = (checks.compiles_without_a_graph_break, HALVES[0])
SINGLE = partial(checks.error_budget, dtypes=(torch.float32,), **FEW)
CHECKS = [SINGLE if check is checks.error_budget else check for check in checks.CHECKS] + HALVES


def function(check):
    return getattr(check, "func", check)


def name(case):
    if hasattr(case, "name"):
        return case.name
    return "-".join(
        [function(case).__name__, *(str(d).removeprefix("torch.") for d in getattr(case, "keywords", {}).get("dtypes", ()))]
    )


def case(spec, check):
    costly = check in HALVES or check in COSTLY
    quick = not costly or (check in COSTLY and spec.name in REPRESENTATIVES)
    return pytest.param(spec, check, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("spec", "check"), [case(spec, check) for spec in specs() for check in CHECKS], ids=name)
def test_battery(spec, check):
    if function(check).__name__ in spec.skip:
        pytest.skip(spec.skip[function(check).__name__])
    check(spec)


def test_every_op_has_its_representative():
    assert {name.partition("/")[0] for name in REPRESENTATIVES} == {spec.name.partition("/")[0] for spec in specs()}


def test_the_chunk_forms_that_take_a_slot_table_are_these():
    found = {spec.name.partition("/")[0] for spec in specs() if takes_slots(spec)}
    assert found == {"carve", "ccq", "delta", "qdelta", "mamba3"}
