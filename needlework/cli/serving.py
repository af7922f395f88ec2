"""The commands that answer requests: serve over HTTP, chat in the terminal."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .app import app, console, errors
from .checkpoints import load_checkpoint

if TYPE_CHECKING:
    import torch

    from needlework.serve.capacity import SchedulerConfig
    from needlework.serve.conversation import Partner
    from needlework.serve.engine import Engine
    from needlework.serve.start import Room
    from needlework.serve.text import Text

Checkpoint = Annotated[Path, typer.Argument(help="A folder that `train` or `compare` wrote (…/checkpoint).")]
Length = Annotated[int, typer.Option(help="Tokens of the longest request, its answer included.", min=2)]
DType = Annotated[
    str | None,
    typer.Option(help="bfloat16, float16 or float32. Default: bfloat16 on a GPU, float32 on a CPU.", metavar="DTYPE"),
]
KeyFile = Annotated[Path | None, typer.Option(help="A file whose first line clients send as their API key. Default: no key.")]
DTYPES = ("bfloat16", "float16", "float32")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def serve(
    context: typer.Context,
    checkpoint: Checkpoint,
    engine: Annotated[Literal["own", "vllm"], typer.Option(help="vllm: what follows -- goes to vLLM's server.")] = "own",
    host: Annotated[str, typer.Option(help="The address to answer at. 0.0.0.0: from other machines too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model. Default: its folder's name.")] = None,
    key_file: KeyFile = None,
    length: Length = 8192,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 64,
    snapshots: Annotated[
        int | None,
        typer.Option(
            help="Slots for beginnings that prompts share. Default: 16, and 0 for a model that writes its pages again.", min=0
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Share of the device's memory. Default: 0.9 of a GPU's, 0.5 of a CPU's.", min=0, max=1)
    ] = None,
    waiting: Annotated[int, typer.Option(help="Requests that may wait; more get 429 and Retry-After.", min=1)] = 1024,
    dtype: DType = None,
) -> None:
    """Serve a checkpoint over HTTP: OpenAI's /v1/completions and /v1/chat/completions, /v1/models, /health, /ready, /metrics."""
    name = name or (checkpoint.parent if checkpoint.name == "checkpoint" else checkpoint).resolve().name
    if engine == "vllm":
        _become_vllm(checkpoint, name, host, port, length, key_file, context.args)
    if context.args:
        raise ValueError(f"{context.args[0]}: arguments after -- are vLLM's, and go with --engine vllm")
    _needs_serving()
    from needlework.serve.front_process import FrontProcess
    from needlework.serve.http import Settings, listen
    from needlework.serve.start import Room

    room = Room(length=length, batch=batch, snapshots=snapshots, memory=memory, waiting=waiting)
    key = _key(key_file)
    with listen(host, port) as bound, _running(checkpoint, room, dtype) as (running, _, config):
        where = f"http://{host if ':' not in host else f'[{host}]'}:{bound.getsockname()[1]}"
        console.print(f"{name}: {_room(config)}", soft_wrap=True)
        with FrontProcess(running, bound, Settings(checkpoint, name, key)) as front:
            console.print(f"{where}/v1 is ready; Ctrl-C stops it after the running answers", soft_wrap=True)
            sys.stdout.flush()
            front.wait()


@app.command()
def chat(
    partner: Annotated[str, typer.Argument(help="A checkpoint's folder, or the address of a server (http://…).")],
    system: Annotated[str | None, typer.Option(help="The system message, before the conversation.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0, max=2)] = 0.7,
    tokens: Annotated[
        int | None, typer.Option(help="Of an answer, at most. Default: as many as there is room for.", min=1)
    ] = None,
    model: Annotated[str | None, typer.Option(help="A server's model. Default: the first that it serves.")] = None,
    key_file: KeyFile = None,
    length: Length = 8192,
    dtype: DType = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D ends the conversation, /new begins another."""
    from needlework.serve.conversation import Asking, Remote

    asking = Asking(temperature, tokens)
    if partner.startswith(("http://", "https://")):
        _converse(Remote(partner, asking, model=model, key=_key(key_file)), system)
        return
    from needlework.serve.conversation import Local
    from needlework.serve.start import Room

    with _running(Path(partner), Room(length=length, batch=1), dtype) as (running, text, _):
        text.conversation([{"role": "user", "content": ""}])  # a checkpoint that cannot chat says so now
        _converse(Local(running, text, asking), system)


@contextmanager
def _running(checkpoint: Path, room: "Room", dtype: str | None) -> "Iterator[tuple[Engine, Text, SchedulerConfig]]":
    from needlework.serve.process import settled
    from needlework.serve.start import start
    from needlework.serve.text import Text

    text = Text.load(checkpoint)
    model, _ = load_checkpoint(checkpoint, _dtype(dtype))
    if model.device.type == "cuda":
        errors.print(
            "compiling this model's kernels; later starts find them in the caches of PyTorch and Triton", soft_wrap=True
        )
    engine, config = start(model, text, room)
    with settled(), engine:
        yield engine, text, config


def _dtype(name: str | None) -> "torch.dtype":
    import torch

    if name is not None and name not in DTYPES:
        raise ValueError(f"--dtype: got {name!r}, expected one of {', '.join(DTYPES)}")
    return getattr(torch, name or ("bfloat16" if torch.cuda.is_available() else "float32"))


def _room(config: "SchedulerConfig") -> str:
    from needlework.report.words import size

    pages = "".join(
        f", {pages:,} pages of {config.page} tokens" + (f" for windows of {window:,}" if window else "")
        for window, pages, _ in config.pools
    )
    given = f"{config.slots} slots{pages}: {size(config.nbytes)}"
    return f"{config.batch} sequences at once of up to {config.length:,} tokens; {given} of states and counts"


def _converse(partner: "Partner", system: str | None) -> None:
    """Reads questions from standard input to its end."""
    begin = [] if system is None else [{"role": "system", "content": system}]
    said = list(begin)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # each Ctrl-C stops an answer
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if question == "/new":
            said = list(begin)
        elif question.strip():
            said = _exchange(partner, said, question)


def _exchange(partner: "Partner", said: list[dict[str, str]], question: str) -> list[dict[str, str]]:
    """The conversation with this question and its answer; without them where there is no answer."""
    from needlework.serve.refused import RefusedError

    asked, answer = [*said, {"role": "user", "content": question}], ""
    try:
        for piece in partner.answer(asked):
            answer += piece
            console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        answer += " …"
    except (RefusedError, ValueError, OSError) as error:
        errors.print(str(error), soft_wrap=True)
        return said
    finally:
        console.out("", highlight=False)
    return [*asked, {"role": "assistant", "content": answer}]


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    key = file.read_text().strip().partition("\n")[0]
    if not key:
        raise ValueError(f"--key-file {file}: its first line is empty, expected an API key")
    return key


def _needs_serving() -> None:
    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ValueError(f"serve needs {', '.join(missing)}; pip install 'needlework[serve]'")


def _become_vllm(
    checkpoint: Path, name: str, host: str, port: int, length: int, key_file: Path | None, more: list[str]
) -> None:
    """This process is from now on vLLM's server."""
    from needlework.serve.vllm import VERSION

    if find_spec("vllm") is None:
        raise ValueError(f"--engine vllm: vLLM is not installed; pip install vllm=={VERSION}")
    given = {"model": checkpoint, "served-model-name": name, "host": host, "port": port, "max-model-len": length}
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    server += [part for option, value in given.items() for part in (f"--{option}", str(value))]
    key = _key(key_file)
    environment = os.environ | ({} if key is None else {"VLLM_API_KEY": key})  # an argument would be seen by all users
    sys.stdout.flush()
    os.execve(sys.executable, [*server, *more], environment)
