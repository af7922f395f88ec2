"""Connections of clients that send nothing, half of a request, or do not read. The loop's clock is the test's: no limit is waited for."""

import asyncio
import json
import resource
import socket
import time
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from needlework.serve import connection, http
from needlework.serve.connection import ClientConnection
from needlework.serve.front import Front
from needlework.serve.request import Event

from .engine import FakeEngine, says
from .texts import byte_text

BODY = b'{"prompt": "hello"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
WHOLE = HEAD % len(BODY) + BODY


class Server:
    """In the running loop, whose clock it moves."""

    def __init__(self, engine):
        self.engine, loop = engine, asyncio.get_running_loop()
        self._bound = http.listen("127.0.0.1", 0)
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.front = Front(engine, byte_text(), name="tiny")
        self._server, self._ahead, real = http.server(self.front), 0.0, loop.time
        loop.time = lambda: real() + self._ahead
        self._running = asyncio.create_task(self._server.serve([self._bound]))

    async def connected(self):
        """A client's reader and writer, and the connection at this end."""
        await until(lambda: self._server.started)
        before = {*self._server.server_state.connections}
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(self._bound.getsockname())
        reader, writer = await asyncio.open_connection(sock=client)
        await until(lambda: len(self._server.server_state.connections) > len(before))
        (own,) = {*self._server.server_state.connections} - before
        return reader, writer, own

    async def pass_by(self, seconds):
        self._ahead += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self):
        self._server.should_exit = True
        await self._running


@asynccontextmanager
async def serving(engine=None):
    server = Server(engine or FakeEngine())
    try:
        yield server
    finally:
        await server.end()


async def until(holds):
    """By a clock that is nobody's: what comes in vain is an error."""
    ends = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends
        await asyncio.sleep(0)


async def got(coroutine):
    task = asyncio.ensure_future(coroutine)
    await until(task.done)
    return task.result()


async def sent(writer, own, data):
    """Data that has reached the other end."""
    seen = []
    received = own.data_received
    own.data_received = lambda part: (received(part), seen.append(len(part)))
    own.transport.set_protocol(own)  # it keeps the method that it calls
    writer.write(data)
    await until(lambda: sum(seen) == len(data))


def run(test):
    asyncio.run(test())


def status(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def answer(reader):
    """Of a connection that goes on."""
    head = await got(reader.readuntil(b"\r\n\r\n"))
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return status(head + await got(reader.readexactly(size)))


def test_a_client_that_sends_nothing_is_hung_up_on():
    async def test():
        async with serving() as server:
            reader, _, own = await server.connected()
            await server.pass_by(59)
            assert not own.transport.is_closing()
            await server.pass_by(2)
            assert await got(reader.read()) == b""

    run(test)


@pytest.mark.parametrize("part", (b"P", WHOLE[:30], WHOLE[:-1], HEAD % len(BODY)), ids=range(4))
def test_half_a_request_is_a_408_and_starts_nothing(part):
    async def test():
        async with serving() as server:
            reader, writer, own = await server.connected()
            await sent(writer, own, part)
            await server.pass_by(61)
            code, body = status(await got(reader.read()))
            assert (
                code == 408
                and body["error"]["code"] == "request_timeout"
                and "not whole after 60 s" in body["error"]["message"]
            )
            await until(lambda: not server._server.server_state.tasks)
            assert not server.engine.streams and (b'status="499"' in server.front.metrics.text()) is (b"\r\n\r\n" in part)

    run(test)


def test_the_time_is_of_the_whole_request_and_not_of_each_byte():
    async def test():
        async with serving() as server:
            reader, writer, own = await server.connected()
            for i in range(3):
                await sent(writer, own, WHOLE[i : i + 1])
                await server.pass_by(19)
            await sent(writer, own, WHOLE[3:4])
            assert not own.transport.is_closing()
            await server.pass_by(19)
            assert status(await got(reader.read()))[0] == 408

    run(test)


def test_each_request_of_a_connection_has_that_time_from_its_first_byte():
    async def test():
        async with serving() as server:
            reader, writer, own = await server.connected()
            for _ in range(2):
                await sent(writer, own, WHOLE[:9])
                await server.pass_by(59)
                writer.write(WHOLE[9:])
                assert (await answer(reader))[0] == 200
            await sent(writer, own, WHOLE[:-1])
            await server.pass_by(61)
            assert status(await got(reader.read()))[0] == 408

    run(test)


def test_a_request_that_is_whole_has_all_time():
    async def test():
        async with serving(FakeEngine(lambda request: None)) as server:
            reader, writer, own = await server.connected()
            await sent(writer, own, WHOLE)
            await until(lambda: server.engine.streams)
            await server.pass_by(3600)
            server.engine.streams[0].put(*says("ab"))
            assert (await answer(reader))[1]["choices"][0]["text"] == "ab"

    run(test)


def test_a_body_that_goes_on_behind_its_answer_is_not_read_for_ever():
    async def test():
        async with serving() as server:
            reader, writer, own = await server.connected()
            await sent(writer, own, b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n")
            assert (await answer(reader))[0] == 404
            for _ in range(20):
                if not own.transport.is_closing():
                    await sent(writer, own, b"x")
                    await server.pass_by(4)
            assert own.transport.is_closing() and await got(reader.read()) == b""

    run(test)


def test_a_client_that_does_not_read_is_hung_up_on_and_its_request_ends():
    async def test():
        async with serving(FakeEngine(lambda request: [Event(token=120)] * 50_000)) as server:
            _, writer, own = await server.connected()
            writer.transport.pause_reading()
            own.transport.set_write_buffer_limits(1024)
            body = BODY[:-1] + b', "stream": true}'
            writer.write(HEAD % len(body) + body)
            await until(lambda: own.flow is not None and own.flow.write_paused)
            await server.pass_by(59)
            assert not own.transport.is_closing()
            await server.pass_by(2)
            assert own.transport.is_closing()
            await until(lambda: server.engine.streams[0].cancelled.is_set())

    run(test)


def test_connections_beyond_the_most_are_a_503_until_one_ends(monkeypatch):
    monkeypatch.setattr(ClientConnection, "most", 2)

    async def test():
        async with serving() as server:
            _, first, own = await server.connected()
            reader, writer, _ = await server.connected()
            refused, last = await asyncio.open_connection(*server._bound.getsockname())
            code, body = status(await got(refused.read()))
            last.close()
            assert code == 503 and body["error"]["message"] == "2 connections are open, as many as may be; try again"
            first.close()
            await until(lambda: own not in server._server.server_state.connections)
            again, more, _ = await server.connected()
            for one, into in ((again, more), (reader, writer)):
                into.write(WHOLE)
                assert (await answer(one))[0] == 200

    run(test)


@pytest.mark.parametrize("files, expected", [(1024, 960), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096), (50, 1)])
def test_no_more_connections_than_files_that_the_process_may_open(monkeypatch, files, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    assert connection.most() == expected
