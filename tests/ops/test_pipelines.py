"""Decode's loops over pages, compiled for sm_90: tiles are under way while one is computed. Triton says nothing where it gives that up."""

from importlib import import_module

import pytest
import torch

from needlework.ops.runtime.launch_configs import rows
from needlework.ops.runtime.target import TARGETS

ENGINES = {"paged/paged": "paged.engine.op", "lucid/decode": "lucid.decode.op"}


@pytest.mark.parametrize(("engine", "page", "left"), [("paged/paged", 64, 2), ("paged/paged", 16, 3), ("lucid/decode", 64, 2)])
def test_two_tiles_are_under_way_while_decode_computes(engine, page, left):
    """A tile of 64 keys lies in one page, or in four, whose numbers are copied too."""
    compiled = pytest.importorskip("needlework.ops.runtime.compile")
    module, row = import_module(f"needlework.ops.{ENGINES[engine]}"), rows(engine)[0]
    assert row.launch["attend" if engine == "lucid/decode" else "decode"]["NS"] == 3
    facts = {"PG": page, "READ": 0, "BT": 1, "PACKED": 0, "SPLIT": int(page == 16), "ROWMAX": 0}
    case = next(
        case
        for case in module.compile_cases(row, torch.bfloat16, 64, 64)
        if case.kernel.__name__ == "attend" and all(case.constexprs.get(name, x) == x for name, x in facts.items())
    )
    made = compiled.compile_case(case, TARGETS["sm_90"])
    text = compiled.disassembled(made.code)
    if text is None:
        pytest.skip("Triton came without nvdisasm")
    assert f"DEPBAR.LE SB0, 0x{left}" in text, f"{left} copies, of a tile each, are not left under way"
    assert not made.spilled
