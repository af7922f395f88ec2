"""The commands that train: compare, train, sweep. The work is done in `needlework/experiment`."""

import importlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .app import CorpusPaths, Runs, app, console, place
from .overrides import changed, of_steps
from .recipes import known, load_recipe, load_recipes, split
from .reports import page_of
from .stop import Stop
from .tables import scores


@app.command()
def compare(
    mixer: Annotated[
        list[str] | None, typer.Option(help="A mixer to compare (see `needlework mixers`); give it again for more.")
    ] = None,
    corpus: CorpusPaths = None,
    name: Annotated[str, typer.Option(help="The run's name: results go to RUNS/NAME.")] = "demo",
    runs: Runs = Path("runs"),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a field of every recipe, e.g. train.seed=1")] = None,
    workers: Annotated[int, typer.Option(help="Mixers trained at a time, one thread each.", min=1)] = 2,
) -> None:
    """Train small models that differ in their mixer alone, and show which finds the needle.

    Trains on real text mixed with needle episodes, measures loss and retrieval at 1x to 8x the training length, and writes
    RUNS/NAME/report.html. About seven minutes on two cores. Ctrl-C saves; the same command goes on where it stopped.
    """
    from needlework.experiment.compare import compare as compare_recipes
    from needlework.experiment.recipe import with_corpus

    demo = importlib.import_module("needlework.recipes.demo")
    known(mixer or [], demo.CATALOG, "mixer")
    recipes = demo.compare(tuple(mixer or demo.COMPARE))
    if corpus:
        recipes = tuple(with_corpus(recipe, corpus) for recipe in recipes)
    recipes = tuple(changed(recipe, set_ or []) for recipe in recipes)
    directory = place(runs, name)
    try:
        with Stop():
            results = compare_recipes(name, recipes, directory, console, workers)
    except KeyboardInterrupt:
        if directory.exists():
            console.print(f"stopped and saved in {directory}; the same command goes on", soft_wrap=True)
        raise
    if results is None:
        console.print(f"a worker was stopped, and saved in {directory}; the same command goes on", soft_wrap=True)
        raise typer.Exit(1)
    console.print(scores(results))
    console.print(f"report: {directory / 'report.html'}", soft_wrap=True)


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="MODULE:FUNCTION of needlework.recipes (demo:qdelta), or of a Python file (my.py:run).")
    ],
    corpus: CorpusPaths = None,
    name: Annotated[str | None, typer.Option(help="The run's name; default: the recipe's.")] = None,
    runs: Runs = Path("runs"),
    steps: Annotated[int | None, typer.Option(help="Train so many steps; phases keep their shares of them.", min=1)] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a field, e.g. train.optim.lr=3e-4")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes on this machine; default: one a GPU.", min=1)] = None,
) -> None:
    """Train and measure one recipe. Ctrl-C, or SIGTERM, saves; the same command goes on where it stopped.

    On a machine with several GPUs one process a GPU is started; on several machines torchrun or a scheduler starts them, and RUNS
    lies on storage that they share.
    """
    from needlework.data import text_read
    from needlework.experiment.claim import claimable, claimed
    from needlework.experiment.progress import training
    from needlework.experiment.recipe import with_corpus
    from needlework.experiment.runner import run
    from needlework.train import relaunch

    chosen = load_recipe(recipe)
    if corpus:
        chosen = with_corpus(chosen, corpus)
    chosen, note = changed(chosen, set_ or []), None
    if steps is not None:
        chosen, note = of_steps(chosen, steps)
    directory = place(runs, chosen.name if name is None else name)
    status = relaunch(sys.argv[1:], ranks)
    if status is not None:
        raise typer.Exit(status)
    first = os.environ.get("RANK", "0") == "0"
    console.quiet = not first
    config = {chosen.name: chosen.resume_fingerprint()}
    if first:
        claimable(directory, config)
    if note:
        console.print(note, soft_wrap=True)

    with Stop() as stop, ExitStack() as held, training(console, chosen.title, chosen.train.steps) as tell:

        def begin() -> None:
            if anew := held.enter_context(claimed(directory, config)):
                differ = ", ".join(anew[:6])
                console.print(
                    f"no checkpoint had been made in {directory}: begun anew with another config ({differ})", soft_wrap=True
                )

        read = lambda corpus: console.print(text_read(corpus.manifest), soft_wrap=True)
        entry = run(chosen, directory / chosen.name, begin=begin, stop=stop, on_step=tell, on_text=read)
    if entry is not None:
        console.print(scores({"lengths": chosen.evaluate.lengths, "mixers": [entry]}))
        console.print(f"checkpoint: {directory / chosen.name / 'checkpoint'}", soft_wrap=True)
    elif first:
        console.print(f"stopped and saved in {directory}; the same command goes on", soft_wrap=True)
    if stop.signalled:
        raise KeyboardInterrupt


@app.command()
def sweep(
    recipes: Annotated[str, typer.Argument(help="MODULE:FUNCTION that returns several recipes, e.g. comparison:small.")],
    name: Annotated[str | None, typer.Option(help="The sweep's name; default: the module's.")] = None,
    runs: Runs = Path("runs"),
    only: Annotated[list[str] | None, typer.Option(help="A recipe's name; give it again for more. Default: all.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time; default: one a GPU, two without one.", min=1)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Save and stop after so many minutes; the same command goes on.", min=0)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of every recipe, e.g. train.compile=False")
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="A file of results, .jsonl.xz: what is in it is not run again, and it takes what is done."),
    ] = None,
) -> None:
    """Train and measure many recipes and seeds, in as many calls as it takes. Results go to RUNS/NAME/results."""
    import torch

    from needlework.experiment.sweep import sweep as run_sweep

    module, _ = split(recipes)
    found = load_recipes(recipes)
    known(only or [], {recipe.name: recipe for recipe in found}, "recipe")
    found = tuple(changed(recipe, set_ or []) for recipe in found if not only or recipe.name in only)
    directory = place(runs, _stem(module) if name is None else name)
    with Stop():
        missing = run_sweep(found, directory, console, workers or torch.cuda.device_count() or 2, minutes, pack)
    if missing:
        console.print(f"{len(missing)} runs are left; the same command goes on")
    else:
        console.print(f"all done; {page_of(directory / 'results', module)}", soft_wrap=True)


def _stem(module: str) -> str:
    """The last part of a module's name, or of a file's: study.pilot is pilot, my.py is my."""
    return Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
