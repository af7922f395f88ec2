"""Every spec times every check of the battery; a check that a definition rules out is skipped with the spec's own reason."""

import pytest

from needlework.ops.specs import specs
from needlework.testing.checks import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_battery(spec, check):
    if check.__name__ in spec.skip:
        pytest.skip(spec.skip[check.__name__])
    check(spec)
