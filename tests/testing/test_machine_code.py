"""Reads of uniform registers that nothing wrote, in machine code written by hand in nvdisasm's manner."""

import pytest

from needlework.testing import builds
from needlework.testing.machine_code import unwritten

HEADER = """
	.section	.text.solve,"ax",@progbits
solve:
.text.solve:
"""
# the descriptor of operand B is UR6, UR7 where A is in registers; of A, then B, UR4 to UR7 where it is not
LOOP = """
        /*0000*/                   S2UR UR5, SR_CgaCtaId ;
        /*0010*/                   UMOV UR4, 0x400 ;
        /*0020*/                   ULEA UR4, UR5, UR4, 0x18 ;
        /*0030*/                   USHF.R.U32.HI UR4, URZ, 0x4, UR4 ;
        /*0040*/                   UMOV UR5, 0x40000040 ;
        /*0042*/                   UIADD3 UR6, UR4, 0x80, URZ ;
        /*0044*/                   UMOV UR7, 0x40000040 ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0060*/                   UIADD3 UR6, UR4, 0x80, URZ ;
        /*0070*/                   UMOV UR7, 0x40000040 ;
        /*0080*/                   HGMMA.64x32x16.F32 R24, R120, gdesc[UR4], R24, gsb0 ;
        /*0090*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*00a0*/                   HGMMA.64x32x16.F32 R24, gdesc[UR4], R24, !UPT ;
        /*00b0*/                   EXIT ;
"""


def test_registers_that_every_product_takes_were_written():
    assert unwritten(HEADER + LOOP) == []


def test_a_product_whose_descriptor_nothing_wrote_is_named_with_its_registers():
    found = unwritten(HEADER + LOOP.replace("UMOV UR7, 0x40000040", "UMOV UR9, 0x40000040"))
    assert len(found) == 2 and "HGMMA.64x32x16.F32 R24, R120, gdesc[UR4], R24, gsb0 at 0x0080 reads UR7" in found[0]


def test_what_is_made_of_an_unwritten_register_is_unwritten():
    """UR4 was written, and then again from UR5."""
    first, last = unwritten(HEADER + LOOP.replace("S2UR UR5", "S2UR UR8"))
    assert first.endswith("at 0x0080 reads UR6, which not every path writes") and last.endswith(
        "at 0x00a0 reads UR4, UR6, which not every path writes"
    )


@pytest.mark.parametrize("source", ("UR12", "R1"))
def test_a_descriptor_is_followed_through_the_registers_of_threads(source):
    """As ptxas 12.8.93 made those of PaTH's `prepare` and `unwind` for heads of 32: from UR16, and from the stack's address."""
    through = f"""
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0002*/                   IMAD.MOV.U32 R20, RZ, RZ, RZ ;
        /*0004*/                   IADD3 R60, P3, {source}, 0x2, RZ ;
        /*0006*/                   IADD3.X R62, R20, -0x7fffffe0, RZ, P3, !PT ;
        /*0008*/                   LDL R4, [R1+0x10] ;"""
    text = LOOP.replace("UMOV UR4, 0x400", "R2UR UR4, R62").replace("ULEA UR4, UR5, UR4, 0x18", "R2UR UR4, R60")
    first, last = unwritten(HEADER + through + text)
    assert first.endswith("at 0x0080 reads UR6, which not every path writes") and last.endswith(
        "at 0x00a0 reads UR4, UR6, which not every path writes"
    )
    assert unwritten(HEADER + through.replace(source, "R20") + text) == []


@pytest.mark.parametrize("written, what", (("UMOV UR4, 0x400", "UR4"), ("MOV R60, 0x400", "UR6")))
def test_a_descriptor_that_only_a_loop_before_makes_is_named(written, what):
    """As ptxas 12.8.93 made that of PaTH's `sweep` of two heads, for older superblocks: where the loop over its own superblock is entered. The
    first block of a superblock has no such loop."""
    other = {"UR4": "MOV R60, 0x400", "UR6": "UMOV UR4, 0x400"}[what]
    entry = f"""
        /*0000*/                   UMOV UR5, 0x40000040 ;
        /*0010*/                   UMOV UR7, UR5 ;
        /*0020*/                   {other} ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
        /*0040*/                   {written} ;
.L_x_3:
        /*0050*/                   UIADD3 UR4, UR4, 0x2, URZ ;
        /*0060*/                   R2UR UR6, R60 ;
        /*0070*/                   HGMMA.64x32x16.F32 R24, gdesc[UR4], R24, !UPT ;
        /*0080*/                   EXIT ;
"""
    found = unwritten(HEADER + entry)
    assert found == [f"HGMMA.64x32x16.F32 R24, gdesc[UR4], R24, !UPT at 0x0070 reads {what}, which not every path writes"]
    assert unwritten(HEADER + entry.replace("@!P0 BRA", "@!P0 NOP")) == []


def test_where_threads_meet_again_is_no_branch():
    """BSSY says where, and does not go there."""
    begun = LOOP.replace("UMOV UR4, 0x400 ", "BSSY B0, `(.L_x_1) ;\n        /*0012*/                   UMOV UR4, 0x400 ")
    assert "BSSY" in begun and unwritten(HEADER + begun) == []


def test_what_a_predicate_writes_is_written():
    """The same one guards what reads it."""
    assert unwritten(HEADER + LOOP.replace("         UMOV UR5", "    @P3  UMOV UR5")) == []


def test_each_kernel_of_a_file_starts_with_nothing():
    other = HEADER + "        /*0000*/                   HGMMA.64x32x16.F32 R24, R120, gdesc[UR4], R24 ;\n"
    assert len(unwritten(HEADER + LOOP + other)) == 1


@pytest.mark.parametrize(
    "text, error", ((HEADER + LOOP, False), (HEADER + LOOP.replace("UMOV UR7", "UMOV UR9"), True), (None, False))
)
def test_a_build_whose_machine_code_is_wrong_is_an_error(text, error, monkeypatch):
    compiled = pytest.importorskip("needlework.ops.runtime.compile")
    made = compiled.Compiled("solve", 168, 1024, 0, 2, 0, b"")
    monkeypatch.setattr(compiled, "compile_case", lambda case, target: made)
    monkeypatch.setattr(compiled, "disassembled", lambda cubin: text)
    task = next(task for task in builds.tasks(False) if task.target == "sm_90")
    found = builds._compile(task)
    assert found and {"HGMMA.64x32x16.F32 R24, R120" in build.error for build in found} == {error}


def test_the_disassembler_is_told_of(monkeypatch, tmp_path):
    compiled = pytest.importorskip("needlework.ops.runtime.compile")
    assert compiled.versions()["nvdisasm"][0].isdigit()
    monkeypatch.setattr(compiled, "TOOLS", tmp_path)
    assert compiled.versions()["nvdisasm"].startswith("missing")
    assert compiled.disassembled(b"") is None
