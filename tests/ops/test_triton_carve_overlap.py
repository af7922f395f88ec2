"""CARVE's launches that begin before the one ahead of them is done: each of them waits, and lets the next one begin only then."""

import os

import pytest
import torch

pytest.importorskip("triton")

from needlework.ops.carve.feedback import backward, forward
from needlework.ops.runtime.launch_configs import rows

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter knows no early launches")

CONFIGS = {config.name: config for config in rows("delta/channel")}
CHAIN = ["couplings", "enter_kernel", "gates_kernel", "leave_kernel", "pairs", "replay", "walk_kernel"]


def cases(name: str) -> list:
    return [case for engine in (forward, backward) for case in engine.compile_cases(CONFIGS[name], torch.bfloat16, 128, 128)]


def test_every_early_launch_waits():
    early = [case for case in cases("sm90") if case.options.get("launch_pdl")]
    assert sorted({case.kernel.__name__ for case in early}) == CHAIN
    for case in early:
        text = case.kernel.src
        waits, begins = text.index("gdc_wait()"), text.index("gdc_launch_dependents()")
        assert case.constexprs["PDL"] == 1 and text.count("gdc_wait()") == 1
        # `couplings` alone runs beside the launch ahead of it, and ends after it
        assert waits < begins or (case.kernel.__name__ == "couplings" and waits > text.rindex("tl.store"))


def test_no_other_launch_is_early():
    assert not any(case.constexprs.get("PDL") for case in cases("sm90") if not case.options.get("launch_pdl"))
    assert not any(case.constexprs.get("PDL") or case.options.get("launch_pdl") for case in cases("plain"))
