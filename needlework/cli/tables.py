"""What the commands print as tables."""

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from needlework.testing.builds import Build
    from needlework.testing.doctor import Verdict


def scores(results: dict[str, Any]) -> Table:
    """Loss, and the digits right of every task, by length, one row a mixer."""
    from needlework.experiment.tasks import TASKS

    table = Table(box=None, pad_edge=False)
    table.add_column("mixer")
    tasks = [task for task in TASKS if any(task in entry for entry in results["mixers"])]
    for heading in ("loss", *tasks):
        for T in results["lengths"]:
            table.add_column(f"{heading}\n{T}", justify="right")
    for entry in results["mixers"]:
        row = [f"{entry['loss'][str(T)]:.3f}" for T in results["lengths"]]
        row += [f"{entry[task][str(T)]['accuracy']:.0%}" for task in tasks for T in results["lengths"]]
        table.add_row(entry["title"], *row)
    return table


def build_table(found: "list[Build]") -> Table:
    names = ("engine", "config", "kernel", "dtype", "K", "V", "target", "registers", "shared", "spilled", "wgmma", "mma")
    table = Table(*names, "", box=None, pad_edge=False)
    for b in found:
        verdict = Text(b.error.splitlines()[0], style="red") if b.error else "ok"
        table.add_row(*(str(getattr(b, name)) for name in names), verdict)
    return table


def verdict_table(found: "list[Verdict]") -> Table:
    names = ("op", "form", "config", "dtype", "K", "V", "seconds", "tensor")
    table = Table("op", "form", "config", "dtype", "K", "V", "s", "worst", "error ÷ budget", "", box=None, pad_edge=False)
    for v in found:
        ratio = "" if v.ratio is None else f"{v.ratio:.2f}"
        verdict = Text("; ".join(v.failing), style="red") if v.failing else "ok"
        config = f"{v.engine} {v.config}"
        table.add_row(*(config if name == "config" else str(getattr(v, name)) for name in names), ratio, verdict)
    return table
