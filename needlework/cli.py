"""The command line: what each command reads and prints. What it does is run.py's and compare.py's."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

app = typer.Typer(
    help="Sequence mixers that find the needle: compare them, train them, measure them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# a pipe has no width of its own, and tables must not be cut there; [brackets] are shapes, extras and paths
console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)

CorpusPaths = Annotated[
    list[Path] | None,
    typer.Option(
        help='Text to train on: files, folders, .jsonl or .parquet with a "text" field. Default: Python\'s own library.'
    ),
]
Runs = Annotated[Path, typer.Option(help="The folder that holds runs.")]


def main() -> None:
    """Entry point: what a user did wrong is one line and exit status 1, never a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is Ctrl-C
    try:
        app(repeated(sys.argv[1:], "--corpus"))
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        from needlework.run import EXPLAINED  # late: --help needs no PyTorch

        if not isinstance(error, EXPLAINED):
            raise
        console.quiet = False  # an error is told by whatever rank has it
        console.print(Text("needlework: ", style="red").append(str(error), style="default"), soft_wrap=True)
        status = 1
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from needlework.train import leave

        leave(status if isinstance(status, int) else 0)
    raise SystemExit(status)


def repeated(arguments: list[str], option: str) -> list[str]:
    """`--corpus a b` as `--corpus a --corpus b`: an option takes one value, and a shell's pattern gives many."""
    out: list[str] = []
    taking = False
    for argument in arguments:
        if argument.startswith("-"):
            taking = argument == option
        elif taking and out[-1] != option:
            out.append(option)
        out.append(argument)
    return out


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
    RUNS/NAME/report.html. Six minutes on two free cores. Ctrl-C saves; the same command goes on where it stopped.
    """
    from needlework.compare import compare as compare_recipes

    demo = importlib.import_module("recipes.demo")
    known(mixer or [], demo.CATALOG, "mixer")
    recipes = demo.compare(tuple(mixer or demo.COMPARE), corpus_config(corpus))
    recipes = tuple(changed(recipe, set_ or []) for recipe in recipes)
    directory = runs / name
    try:
        results = compare_recipes(name, recipes, directory, console, workers)
    except KeyboardInterrupt:
        console.print(f"stopped and saved in {directory}; the same command goes on")
        raise
    console.print(scores(results))
    console.print(f"report: {directory / 'report.html'}")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="MODULE:FUNCTION of recipes/ (demo:qdelta), or of a Python file (my.py:run).")],
    corpus: CorpusPaths = None,
    name: Annotated[str | None, typer.Option(help="The run's name; default: the recipe's.")] = None,
    runs: Runs = Path("runs"),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a field, e.g. train.optim.lr=3e-4")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes on this machine; default: one a GPU.", min=1)] = None,
) -> None:
    """Train and measure one recipe. Ctrl-C, or SIGTERM, saves; the same command goes on where it stopped.

    On a machine with several GPUs one process a GPU is started; on several machines torchrun or a scheduler starts them, and RUNS
    lies on storage that they share.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from needlework.run import claim, run
    from needlework.train import relaunch

    chosen = changed(load_recipe(recipe), set_ or [])
    if corpus:
        chosen = dataclasses.replace(chosen, corpus=corpus_config(corpus))
    status = relaunch(sys.argv[1:], ranks)
    if status is not None:
        raise typer.Exit(status)
    directory = runs / (name or chosen.name)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        claim(directory, {chosen.name: chosen.lasting()})
    else:
        console.quiet = True
    stopped = []
    before = {sign: signal.signal(sign, lambda *_: stopped.append(True)) for sign in (signal.SIGINT, signal.SIGTERM)}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    try:
        with Bar(*columns, console=console) as bar:
            task = bar.add_task(chosen.title, total=chosen.train.steps, now="")
            entry = run(
                chosen, directory / chosen.name, stop=lambda: bool(stopped),
                on_step=lambda p: bar.update(task, completed=p.step, now=f"loss {p.loss:.3f} · {p.tokens_per_second:,.0f} tokens/s"),
            )  # fmt: skip
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    if entry is not None:
        console.print(scores({"lengths": chosen.evaluate.lengths, "mixers": [entry]}))
        console.print(f"checkpoint: {directory / chosen.name / 'checkpoint'}")
    elif first:
        console.print(f"stopped and saved in {directory}; the same command goes on")
    if stopped:
        raise KeyboardInterrupt


@app.command()
def study(
    recipes: Annotated[str, typer.Argument(help="MODULE:FUNCTION that returns several recipes, e.g. comparison:small.")],
    name: Annotated[str | None, typer.Option(help="The study's name; default: the module's.")] = None,
    runs: Runs = Path("runs"),
    only: Annotated[list[str] | None, typer.Option(help="A recipe's name; give it again for more. Default: all.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time; default: one a GPU, or two.", min=1)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Save and stop after so many minutes; the same command goes on.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of every recipe, e.g. train.compile=False")
    ] = None,
) -> None:
    """Train and measure many recipes and seeds, in as many pieces as it takes; results go to RUNS/NAME/results."""
    import torch

    from needlework.study import study as run_study

    found = load_recipes(recipes)
    known(only or [], {recipe.name: recipe for recipe in found}, "recipe")
    found = tuple(changed(recipe, set_ or []) for recipe in found if not only or recipe.name in only)
    directory = runs / (name or Path(recipes.partition(":")[0]).stem)
    missing = run_study(found, directory, console, workers or torch.cuda.device_count() or 2, minutes)
    if missing:
        console.print(f"{len(missing)} runs are to be done still; the same command goes on")
    else:
        console.print(f"all done; needlework report {directory / 'results'} --of {recipes.partition(':')[0]}")


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="The folder of a study's results: RUNS/NAME/results.")],
    of: Annotated[str, typer.Option(help="The recipes' module, which says who is compared with whom.")] = "comparison",
    to: Annotated[Path | None, typer.Option(help="Where the page goes; default: beside the results.")] = None,
) -> None:
    """Make the page of a study from its results: tables with mean ± spread, curves, claims, limits."""
    from needlework.eval.study import load_study
    from needlework.eval.study_page import write_page

    for name in ("MIXERS", "FAMILIES", "GLANCE", "CLAIMS", "LIMITS"):
        module, _ = load_module(f"{of}:{name}")
    study = load_study(results, module.MIXERS, module.FAMILIES, module.GLANCE)
    page = write_page(study, to or results, module.CLAIMS, module.LIMITS)
    console.print(f"page: {page}")


@app.command("eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that `train` or `compare` wrote (…/checkpoint).")],
    corpus: CorpusPaths = None,
    length: Annotated[list[int] | None, typer.Option(help="A length in tokens; give it again for more.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="A task; give it again for more. Default: needle, needles.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a checkpoint: loss on held-out text and retrieval at each length.

    Tasks: needle, needles (four at once), needles-2, needles-8, passkey, number, uuid, multikey, induction.
    """
    from needlework.data import load_corpus
    from needlework.measure import Evaluation, measure
    from needlework.run import state_bytes

    model, tokenizer = load_checkpoint(checkpoint)
    chosen = {"lengths": tuple(length or ()), "tasks": tuple(task or ())}
    evaluation = Evaluation(**{name: value for name, value in chosen.items() if value})
    entry = measure(model, load_corpus(corpus_config(corpus), tokenizer), evaluation)
    entry |= {"title": checkpoint.name, "state_bytes": {str(T): state_bytes(model, T) for T in evaluation.lengths}}
    console.print_json(json.dumps(entry)) if as_json else console.print(
        scores({"lengths": evaluation.lengths, "mixers": [entry]})
    )


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that `train` or `compare` wrote (…/checkpoint).")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Continue a text."""
    import torch

    model, tokenizer = load_checkpoint(checkpoint)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise ValueError("--prompt is empty: expected at least one token to go on from")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    ids = torch.tensor([ids], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **sampling)
    console.print(tokenizer.decode(out[0].tolist()), soft_wrap=True)


@app.command()
def doctor(
    full: Annotated[bool, typer.Option("--full", help="Every size, form and dtype of every plan.")] = False,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile every kernel; needs no GPU.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write what was found here, as JSON.")] = None,
) -> None:
    """Check the Triton kernels on this machine, under every launch plan that may be picked here.

    Forward and gradients against the definition in float64, by the error budget, each run twice. A plan that is wrong (over twice
    its budget, not the same twice, or not to be run) is struck off and never taken on this machine again; what is over the budget
    by less is reported. The exit status is 1 for either. Attach the report to an issue.
    """
    import time

    from needlework.testing import processes

    began = time.monotonic()
    processes.context()  # its server imports PyTorch beside us
    import torch

    from needlework.ops.common.launch import capability, interpreted
    from needlework.ops.common.struck import path
    from needlework.testing import builds
    from needlework.testing import doctor as checks

    if importlib.util.find_spec("triton") is None:
        raise ValueError("doctor: Triton is not installed (pip install triton); the ops run on torch without it")
    if compile_only and interpreted():
        raise ValueError("doctor --compile-only: unset TRITON_INTERPRET, the interpreter compiles nothing")
    if not (compile_only or interpreted() or torch.cuda.is_available()):
        raise ValueError("doctor: no CUDA device here; --compile-only compiles the kernels without one")
    known_here = checks.facts()
    for name, value in known_here.items():
        console.print(f"{name}: {value}", soft_wrap=True)
    device = torch.device("cpu" if interpreted() or compile_only else "cuda")
    if told := checks.warning(known_here, (9, 0) if compile_only else capability(device)):
        console.print(told, style="yellow", soft_wrap=True)
    with console.status("compiling") as status:
        if compile_only:
            found = builds.compile_all(full, lambda count, total: status.update(f"compiling: {count} of {total}"))
            table, failed, struck = build_table(found), [b for b in found if b.error], False
        else:
            status.update("compiling and judging")

            def tell(v: checks.Verdict, count: int, total: int) -> None:
                row = f"{v.op} {v.form}, {v.engine} {v.plan}, {v.dtype}, K {v.K}, V {v.V}"
                status.update(f"{count} of {total}: {row}")
                if full or v.failing:  # minutes, or what is known already
                    told = "; ".join(v.failing) or "ok"
                    console.print(f"{time.monotonic() - began:4.0f} s, {count} of {total}: {row}: {told}, {v.seconds} s")

            found = checks.run(device, full, tell)
            table, failed, struck = verdict_table(found), [v for v in found if v.failing], not interpreted()
    console.print(table)
    seconds = time.monotonic() - began
    if report is not None:
        report.write_text(json.dumps(checks.report(found, known_here, seconds), indent=1))
        console.print(f"report: {report}", soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} of {len(found)} failed, {seconds:.0f} s", style="red")
        if struck and any(v.wrong for v in failed):
            console.print(f"what is wrong is struck off in {path()}; --full takes back what passes it", soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"{len(found)} checked, all right, {seconds:.0f} s")


def build_table(found: list[Any]) -> Table:
    names = ("engine", "plan", "kernel", "dtype", "K", "V", "sm", "registers", "shared", "spilled", "wgmma", "mma")
    table = Table(*names, "", box=None, pad_edge=False)
    for b in found:
        verdict = Text(b.error.splitlines()[0], style="red") if b.error else "ok"
        table.add_row(*(str(getattr(b, name)) for name in names), verdict)
    return table


def verdict_table(found: list[Any]) -> Table:
    names = ("op", "form", "plan", "dtype", "K", "V", "seconds", "tensor")
    table = Table("op", "form", "plan", "dtype", "K", "V", "s", "worst", "error ÷ budget", "", box=None, pad_edge=False)
    for v in found:
        ratio = "" if v.ratio is None else f"{v.ratio:.2f}"
        verdict = Text("; ".join(v.failing), style="red") if v.failing else "ok"
        plan = f"{v.engine} {v.plan}"
        table.add_row(*(plan if name == "plan" else str(getattr(v, name)) for name in names), ratio, verdict)
    return table


@app.command()
def mixers(
    length: Annotated[int, typer.Option(help="The length in tokens at which growing states are counted.", min=1)] = 8192,
) -> None:
    """The mixers by name: equation, state, cost.

    Bytes are of one layer and sequence in bfloat16: recurrent heads 8 of 128 x 128, attention 8 query and 2 key-value heads
    of 128, D 1024.
    """
    import torch

    from needlework.eval.words import size
    from needlework.layers.catalog import CATALOG, Sizes

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


def known(names: list[str], there: dict[str, Any], what: str) -> None:
    from needlework.layers.config import nearest

    for name in names:
        if name not in there:
            raise ValueError(f"unknown {what} {name!r}{nearest(name, list(there))}; known: {', '.join(there)}")


def corpus_config(paths: list[Path] | None):
    from needlework.data import CorpusConfig

    # the standard library's first 4 MiB are plenty for the demo; of one's own text as much as memory holds comfortably
    return CorpusConfig(kind="files", paths=tuple(map(str, paths)), max_bytes=1 << 28) if paths else CorpusConfig()


def load_recipe(name: str):
    """demo:qdelta is recipes/demo.py's function qdelta; a module that ends in .py is a file."""
    from needlework.run import Recipe

    module, function = load_module(name)
    recipe = getattr(module, function)()
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe {name!r}: returned {type(recipe).__name__}, expected a needlework.run.Recipe")
    return recipe


def load_recipes(name: str):
    """comparison:small is what recipes/comparison.py's function small returns: several recipes."""
    from needlework.run import Recipe

    module, function = load_module(name)
    found = getattr(module, function)()
    if not isinstance(found, tuple) or not found or not all(isinstance(recipe, Recipe) for recipe in found):
        raise ValueError(f"recipes {name!r}: returned {type(found).__name__}, expected a tuple of needlework.run.Recipe")
    return found


def load_module(name: str):
    """The module of MODULE:FUNCTION and the function's name, which it has."""
    module_name, _, function = name.partition(":")
    if not function:
        raise ValueError(f"recipe {name!r}: expected MODULE:FUNCTION, e.g. demo:qdelta or my.py:run")
    if module_name.endswith(".py"):
        if not Path(module_name).is_file():
            raise ValueError(f"recipe {name!r}: there is no file {module_name}")
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses of the file look themselves up there
        spec.loader.exec_module(module)
    else:
        if importlib.util.find_spec(f"recipes.{module_name}") is None:
            raise ValueError(f"recipe {name!r}: there is no recipes/{module_name}.py")
        module = importlib.import_module(f"recipes.{module_name}")
    known([function], vars(module), "recipe")
    return module, function


def changed(config: Any, settings: list[str]) -> Any:
    """The config with every "a.b=value" applied; values are Python literals, or text."""
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r}: expected FIELD=VALUE")
        config = _replaced(config, path.split("."), value, path)
    return config


def _replaced(config: Any, path: list[str], text: str, whole: str) -> Any:
    from needlework.layers.config import nearest
    from needlework.models import NeedleworkConfig

    fields = _fields(config)
    if not fields:
        raise ValueError(f"--set {whole}: {type(config).__name__} has no fields that can be set")
    if path[0] not in fields:
        raise ValueError(f"--set {whole}: no field {path[0]!r}{nearest(path[0], list(fields))}; known: {', '.join(fields)}")
    old = fields[path[0]]
    new = {path[0]: _replaced(old, path[1:], text, whole) if len(path) > 1 else _value(old, text, whole)}
    if isinstance(config, dict):
        return config | new
    return config.replaced(**new) if isinstance(config, NeedleworkConfig) else dataclasses.replace(config, **new)


def _fields(config: Any) -> dict[str, Any]:
    """What can be set: a dict's keys, a dataclass's fields; of a model's config its own, none of transformers'."""
    from needlework.models import NeedleworkConfig

    if isinstance(config, dict):
        return config
    if not dataclasses.is_dataclass(config):
        return {}
    names = [field.name for field in dataclasses.fields(config)]
    if isinstance(config, NeedleworkConfig):
        names = inspect.get_annotations(NeedleworkConfig)
    return {name: getattr(config, name) for name in names}


def _value(old: Any, text: str, whole: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(old, float) and isinstance(value, int):
        value = float(value)
    if old is not None and not isinstance(value, type(old)):
        raise ValueError(f"--set {whole}: got {text!r}, expected {type(old).__name__} such as {old!r}")
    return value


def load_checkpoint(path: Path):
    """The model, in evaluation mode, on the GPU where there is one, and its tokenizer."""
    import torch

    from needlework.data import load_tokenizer
    from needlework.models import NeedleworkForCausalLM, disable_progress_bar

    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: expected a folder with config.json, model.safetensors and tokenizer.json")
    disable_progress_bar()
    model = NeedleworkForCausalLM.from_pretrained(path).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), load_tokenizer(path / "tokenizer.json")


def scores(results: dict[str, Any]) -> Table:
    """Loss, and the digits right of every task, by length, one row a mixer."""
    from needlework.measure import TASKS

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
