"""Uniform registers that a wgmma of Hopper's machine code takes and that a path before it has not written.

ptxas 12.8.93 has assembled kernels in which the descriptor of a product's operand in shared memory starts from a register that nothing
wrote, or from R1, where the stack's address is; or from one that is written where a loop is entered, for a product behind the loop which is
reached without it. That is an illegal access, or a wrong result. What is read here is nvdisasm's text.

Registers are numbers here, uniform ones 0 to 63, the others VECTOR more: those of threads pass descriptors on where uniform ones are scarce.
"""

import re
from typing import NamedTuple

LABEL = re.compile(r"^([.$\w]+):\s*$")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
PRODUCT = re.compile(r"[A-Z]*GMMA\b")
# their first operand is not a result, though they begin like those whose is
SOURCES_ALONE = ("UTMA", "UBLKCP", "UBLKRED", "UBLKPF", "UCGABAR", "USETMAXREG")
RESULTS = ("U", "R2UR", "S2UR", "VOTEU", "REDUX")
VECTOR, STACK = 100, "c[0x0][0x28]"  # the stack's address among a kernel's parameters


class Instruction(NamedTuple):
    address: str
    predicate: str | None
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.name} {self.operands} at 0x{self.address}"


def unwritten(text: str) -> list[str]:
    """Every wgmma that takes a uniform register, or a result of one, that some path before it does not write; each with its registers."""
    found = []
    for lines, labels in _functions(text):
        effects = [_effect(line) for line in lines]
        for line, (_, reads), known in zip(lines, effects, _known(lines, labels, effects), strict=True):
            missing = {n for n in reads - known if n < VECTOR} if known is not None and PRODUCT.match(line.name) else ()
            if missing:
                found.append(f"{line} reads {', '.join(f'UR{n}' for n in sorted(missing))}, which not every path writes")
    return found


def _functions(text: str) -> list[tuple[list[Instruction], dict[str, int]]]:
    """Instructions of each section, and which of them follows a label."""
    found: list[tuple[list[Instruction], dict[str, int]]] = []
    for row in text.splitlines():
        if label := LABEL.match(row):
            if label[1].startswith(".text."):
                found.append(([], {}))
            elif found:
                found[-1][1][label[1]] = len(found[-1][0])
        elif found and (line := LINE.search(row)):
            found[-1][0].append(Instruction(*line.groups()))
    return found


def _known(lines, labels, effects) -> list[set[int] | None]:
    """Registers that every path has written before each instruction; None where no path leads.

    What is made of an unwritten register counts as unwritten, what is written under a predicate as written: the same one guards its reads.
    """
    known: list[set[int] | None] = [None] * len(lines)
    todo: list[tuple[int, set[int]]] = [(0, set())] if lines else []
    while todo:
        i, coming = todo.pop()
        before = known[i]
        here = coming if before is None else before & coming
        if here == before:
            continue
        known[i] = here
        writes, reads = effects[i]
        if reads <= here:
            leaving = here | writes
        else:
            leaving = here if lines[i].predicate else here - writes
        todo += [(j, leaving) for j in _next(i, lines, labels)]
    return known


def _next(i: int, lines: list[Instruction], labels: dict[str, int]) -> list[int]:
    line = lines[i]
    after = []
    if line.name.startswith(("BRA", "CALL")) and (target := re.search(r"`\(([.$\w]+)\)", line.operands)):
        after += [labels[target[1]]] if target[1] in labels else []
    leaves = line.name.startswith(("BRA", "BRX", "JMP", "JMX", "RET", "EXIT"))
    if not leaves or line.predicate or re.match(r"!?U?P\d", line.operands):
        after.append(i + 1)
    return [j for j in after if j < len(lines)]


def _effect(line: Instruction) -> tuple[set[int], set[int]]:
    """Registers that an instruction writes and reads."""
    name = line.name
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", line.operands)]
    wide = 2 if ".64" in name or ".WIDE" in name else 1
    if parts[-1] == STACK:
        return set(), set()
    # a wide product's sum is wide and its factors are not; a constant's address is not
    narrow = name.startswith(("UIMAD", "IMAD", "ULDC"))
    writes: set[int] = set()
    reads: set[int] = set()
    if name.startswith(RESULTS) and not name.startswith(SOURCES_ALONE):
        if first := re.fullmatch(r"UR(\d+)(\.\w+)?", parts[0]):
            writes |= _span(int(first[1]), wide)
        parts[0] = ""
    elif first := re.fullmatch(r"R(\d+)(\.\w+)?", parts[0]):
        writes |= _span(VECTOR + int(first[1]), 4 if re.search(r"\.128|MMA|LDSM", name) else 2 if name == "CS2R" else wide)
        parts[0] = ""
    for i, part in enumerate(parts):
        if "[" not in part:
            reads |= {VECTOR + int(n) for n in re.findall(r"(?<![A-Z])R(\d+)", part)}
        for n in map(int, re.findall(r"UR(\d+)", part)):
            if f"gdesc[UR{n}]" in part:
                # with the first operand in registers the second's descriptor alone
                reads |= _span(n + 2, 2) if re.match(r"-?R\d+", parts[1]) else _span(n, 4)
            elif f"desc[UR{n}]" in part:
                reads |= _span(n, 2)
            else:
                reads |= _span(n, 1 if "[" in part or (narrow and i < 3) else wide)
    return writes, reads


def _span(n: int, count: int) -> set[int]:
    return set(range(n, n + count))
