"""The error tables of the cards: `python -m needlework.testing.cards` measures every spec and rewrites them.

This file writes what is between the two marks of ops/<op>/README.md; the rest of a card is written by hand. Knows no op
by name. A spec over its budget raises, and its card keeps the old table.
"""

import platform
from pathlib import Path

import torch

import needlework
from needlework.ops.api import OpSpec
from needlework.ops.specs import OPS, specs
from needlework.testing.budget import error_budget

BEGIN, END = "<!-- error -->", "<!-- /error -->"


def card(op: str) -> Path:
    return Path(needlework.__file__).parent / "ops" / op / "README.md"


def section(text: str) -> str:
    """The text between a card's marks."""
    return text.split(BEGIN)[1].split(END)[0].strip()


def table(members: list[OpSpec]) -> str:
    """Worst error ÷ budget over outputs, states and gradients, heads and styles of input: at most 1 is within budget."""
    measured = {spec.name: error_budget(spec) for spec in members}
    dtypes = list(next(iter(measured.values())))
    rows = [["worst error ÷ budget", *dtypes], ["---"] * (1 + len(dtypes))]
    rows += [[name, *(f"{worst[dtype]:.2f}" for dtype in dtypes)] for name, worst in measured.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    made = f"torch {torch.__version__}, {platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"
    return "\n".join([*lines, "", f"Made by `python -m needlework.testing.cards` with {made}."])


def main() -> None:
    for op in OPS:
        text = card(op).read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        new = table([spec for spec in specs() if spec.name.split("/")[0] == op])
        card(op).write_text(f"{before}{BEGIN}\n{new}\n{END}{after}")


if __name__ == "__main__":
    main()
