"""A server for a process of its own."""

import threading

from needlework.serve.http import Front, listen, serve

from .engine import FakeEngine, says
from .texts import byte_text


def serving(pipe):
    """A server whose answers end when it is told, once it drains. It tells its port, that it drains, and that it is over."""
    engine = FakeEngine(lambda request: says("ab")[:1])

    def rest():
        engine.until(lambda e: e.draining)
        pipe.send("draining")
        pipe.recv()
        for stream in engine.streams:
            stream.put(*says("ab")[1:])

    threading.Thread(target=rest, daemon=True).start()
    bound = listen("127.0.0.1", 0)
    pipe.send(bound.getsockname()[1])
    serve(Front(engine, byte_text(), name="tiny"), bound)
    pipe.send("over")
