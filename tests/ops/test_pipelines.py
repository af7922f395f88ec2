"""Decode's loops over pages, compiled for sm_90: tiles are under way while one is computed. Triton says nothing where it gives that up."""

from importlib import import_module

import pytest
import torch

from needlework.ops.runtime.launch_configs import rows
from needlework.ops.runtime.target import TARGETS

ENGINES = {"paged/paged": "paged.engine.op", "lucid/decode": "lucid.decode.op"}


@pytest.mark.parametrize("engine", ENGINES)
def test_two_tiles_are_under_way_while_decode_computes(engine):
    compiled = pytest.importorskip("needlework.ops.runtime.compile")
    module, row = import_module(f"needlework.ops.{ENGINES[engine]}"), rows(engine)[0]
    assert row.launch["attend" if engine == "lucid/decode" else "decode"]["NS"] == 3
    facts = {"PG": 64, "READ": 0, "BT": 1, "PACKED": 0, "SPLIT": 0, "ROWMAX": 0}
    case = next(
        case
        for case in module.compile_cases(row, torch.bfloat16, 64, 64)
        if case.kernel.__name__ == "attend" and all(case.constexprs.get(name, x) == x for name, x in facts.items())
    )
    made = compiled.compile_case(case, TARGETS["sm_90"])
    text = compiled.disassembled(made.code)
    if text is None:
        pytest.skip("Triton came without nvdisasm")
    assert "DEPBAR.LE SB0, 0x2" in text, "the copies of k and of values, of a tile each, are not left under way"
    assert not made.spilled
