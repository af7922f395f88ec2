"""The commands that list what there is: mixers, presets."""

import json
from typing import Annotated

import typer
from rich.table import Table

from .app import app, console


@app.command()
def mixers(
    length: Annotated[int, typer.Option(help="The length in tokens at which growing states are counted.", min=1)] = 8192,
) -> None:
    """The mixers by name: equation, state, cost.

    Bytes are of one layer and sequence in bfloat16: recurrent heads 8 of 128 x 128, attention 8 query and 2 key-value heads
    of 128, D 1024.
    """
    import torch

    from needlework.layers.catalog import CATALOG, Sizes
    from needlework.report.words import size

    sizes = Sizes(heads=8, key_dim=128, value_dim=128, attention_heads=8, kv_heads=2, head_dim=128)
    table = Table("name", "mixer", "equation", "state", f"bytes at {length:,}", "cost", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for name, mixer in CATALOG.items():
        with torch.device("meta"):
            held = mixer.make(sizes).build(1024).state_size(length, torch.bfloat16)
        table.add_row(name, mixer.title, mixer.equation, mixer.state, size(held), mixer.cost)
    console.print(table)


@app.command()
def presets(as_json: Annotated[bool, typer.Option("--json", help="Print {name: parameters} as JSON.")] = False) -> None:
    """The papers' models with their exact parameter counts. Nothing is allocated."""
    from needlework.models.presets import PRESETS, count_parameters, preset

    counts = {name: count_parameters(preset(name)) for name in PRESETS}
    if as_json:
        print(json.dumps(counts, indent=1))
        return
    table = Table("preset", "parameters", "what it is", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, count in counts.items():
        source = getattr(PRESETS[name], "func", PRESETS[name])
        table.add_row(name, f"{count:,}", (source.__doc__ or "").strip().splitlines()[0])
    console.print(table)
