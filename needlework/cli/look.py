"""The command that looks inside a checkpoint: look."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app, console


@app.command()
def look(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that `train`, `compare` or `convert` wrote (…/checkpoint).")],
    text: Annotated[Path, typer.Option(help="A file of text that the model reads.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("look.html"),
    tokens: Annotated[int, typer.Option(help="How many tokens of the text are read.", min=64, max=8192)] = 1024,
) -> None:
    """Look inside a model: one page with what the papers look at, of the rules that it has.

    CCQ's alignment, Q-Delta's contraction and drift, CARVE's content share, staleness and chunkability, LUCID's condition and overlap,
    Polar's effective count and null mass, state norms, selective key overwrite, and maps by head of what each token reads.
    """
    from needlework.experiment.look import look as looked
    from needlework.report.look_page import write_look

    write_look(looked(checkpoint, text, tokens), out)
    console.print(f"page: {out}", soft_wrap=True)
