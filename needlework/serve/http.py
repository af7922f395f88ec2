"""The front's process: Starlette under uvicorn, which answers there, over an engine in the process that started it."""

import asyncio
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import uvicorn

from needlework.serve.connection import ClientConnection
from needlework.serve.front import Front
from needlework.serve.messages import Order
from needlework.serve.process import ENDS, settled
from needlework.serve.remote import RemoteEngine
from needlework.serve.text import Text

LAST_BYTES = 10  # seconds that a client has, once the engine has drained, to read what is its own


class Settings(NamedTuple):
    """What a front needs to know. folder: of the tokenizer. name: of the model. key: what clients must send; None: nothing."""

    folder: Path
    name: str
    key: str | None = None


def server(front: Front) -> uvicorn.Server:
    config = uvicorn.Config(
        front.application(),
        http=ClientConnection,
        ws="none",
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=LAST_BYTES,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address; port 0: one that is free. OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"{host}:{port}: {error}") from None


def main(connection: Connection, bound: socket.socket, length: int, vocabulary: int, settings: Settings) -> None:
    """Answers until a signal ends it. SystemExit with a message where the engine's process is gone.

    Signals are the other process's: a terminal's Ctrl-C reaches both, and the running answers are to end first.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    engine = RemoteEngine(connection, length, vocabulary)
    front = Front(engine, Text.load(settings.folder), name=settings.name, key=settings.key)
    with settled():
        asyncio.run(answer(engine, front, bound))
    if engine.lost:
        raise SystemExit("needlework: the process of the engine has ended, and the front ends with it")


async def answer(engine: RemoteEngine, front: Front, bound: socket.socket) -> None:
    """Until the engine orders the end, and the clients have what is theirs."""
    running = server(front)

    def obey(order: Order) -> None:
        front.draining = True
        running.should_exit = order is Order.END

    engine.listen(obey)
    await running.serve([bound])
