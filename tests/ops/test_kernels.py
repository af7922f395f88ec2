"""The battery on the Triton kernels, in Triton's interpreter: TRITON_INTERPRET=1 NEEDLEWORK_IMPL=triton pytest."""

import dataclasses
import os
from functools import partial

import pytest

from needlework.ops.specs import specs
from needlework.testing import checks

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

# impl="triton" raises where "auto" would quietly take torch
SPECS = [
    dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton"))
    for spec in specs()
    if spec.name.split("/")[0] in ("delta", "qdelta") and spec.name != "qdelta/transposed"
]
# the interpreter takes milliseconds a program: what is left out here takes minutes
CHECKS = (
    checks.gradients,
    checks.limits,
    checks.no_tokens,
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Also where a check calls a function of the op's own: limits, steps."""
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: getattr(check, "func", check).__name__)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_battery(spec, check):
    check(spec)
