"""The commands that bring a published checkpoint in and hand one out: convert, push."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app, console


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint of other people: a folder, or a name on the Hugging Face Hub.")],
    directory: Annotated[Path, typer.Argument(help="Where the checkpoint goes: a new folder.")],
    attend: Annotated[str | None, typer.Option(help="The rule that replaces softmax attention: lucid.")] = None,
    read: Annotated[str | None, typer.Option(help="The rule that reads a recurrent state: ccq.")] = None,
    layers: Annotated[str | None, typer.Option(help="The layers that change, from 0: 0,2,4. Default: all that can.")] = None,
) -> None:
    """Convert a published checkpoint: the same model as a folder that `generate`, `eval` and `serve` read.

    Layouts: transformers' Llama, Qwen3 and Mamba-2; flash-linear-attention's GLA, RetNet, DeltaNet, Gated DeltaNet, KDA, PaTH and
    Mamba-2; the authors' Mamba-2, Q-Delta and ATMA. Keys of its config and tensors that needlework has no layer for are refused by name.
    """
    from needlework.models import disable_progress_bar
    from needlework.models.convert import Change
    from needlework.models.convert import convert as convert_to
    from needlework.report.card import write_card

    disable_progress_bar()
    chosen = None if layers is None else tuple(_number(n) for n in layers.split(","))
    done = convert_to(source, directory, Change(attend=attend, read=read, layers=chosen))
    write_card(directory, source=Path(source).resolve().name if Path(source).is_dir() else source)
    console.print(f"{done.layout}: {len(done.config.layout)} layers, {done.parameters:,} parameters", soft_wrap=True)
    if done.changed:
        where = ", ".join(map(str, done.changed))
        console.print(f"{attend or read} in layers {where}; {len(done.new)} tensors are new", soft_wrap=True)
    if not done.tokenizer:
        console.print(
            f"no tokenizer in {source}: `generate`, `eval` and `serve` need a tokenizer.json in {directory}", soft_wrap=True
        )
    console.print(f"checkpoint: {directory}", soft_wrap=True)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--layers: got {text!r}, expected whole numbers with commas between them, e.g. 0,2,4") from None


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="A checkpoint's folder.")],
    repository: Annotated[str, typer.Argument(help="The model on the Hub: NAME/MODEL.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private, if it is made.")] = False,
    licence: Annotated[str | None, typer.Option(help="The model's licence for the card, e.g. apache-2.0.")] = None,
) -> None:
    """Push a checkpoint to the Hugging Face Hub, with a model card: config, text, results, licences.

    All files are one commit, which is compared with the folder afterwards. HF_TOKEN, or `hf auth login`, says who pushes; HF_ENDPOINT
    names another hub.
    """
    from needlework.experiment.release import release

    console.print(f"pushed: {release(directory, repository, private=private, licence=licence)}", soft_wrap=True)
