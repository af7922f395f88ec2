"""The command that makes a study's text: gather."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app, console
from .recipes import load_module


@app.command()
def gather(
    of: Annotated[str, typer.Option(help="The module of recipes that says what the text is.")] = "study.text",
    to: Annotated[Path | None, typer.Option(help="The archive's folder; default: where the recipes read it.")] = None,
    debs: Annotated[Path, typer.Option(help="Where Debian packages are downloaded to and unpacked.")] = Path("runs/debs"),
) -> None:
    """Gather a text that a machine without a network can be given: one compressed file, its manifest, its tokenizer.

    The second study's is of Debian packages, by apt-get and dpkg-deb, and of the Python source that is installed here. Ten minutes
    and 4 GiB of memory.
    """
    module = load_module(of)
    if missing := [name for name in ("make", "FOLDER") if not hasattr(module, name)]:
        raise ValueError(f"{of} has no {', '.join(missing)}, which a text is gathered by")
    folder = to or Path(module.FOLDER)
    manifest = module.make(folder, debs, lambda line: console.print(line, soft_wrap=True))
    console.print(f"{folder}: sha256 {manifest['sha256']}", soft_wrap=True)
