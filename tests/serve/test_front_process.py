"""The front in a process of its own: signals, the end of either process, and what clients hear of it."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="the extra `test` is not installed")
openai = pytest.importorskip("openai", reason="the extra `test` is not installed")

from needlework.serve import http  # noqa: E402
from needlework.serve.front_process import FrontProcess  # noqa: E402
from needlework.serve.http import Settings, listen  # noqa: E402
from needlework.serve.messages import Ready  # noqa: E402
from needlework.testing import processes, ranks  # noqa: E402

from .engine import FakeEngine, says  # noqa: E402
from .test_http import text_of  # noqa: E402
from .texts import folder  # noqa: E402


@pytest.fixture
def context():
    """Of processes that start at once; `serve` spawns."""
    return processes.context(ranks.IMPORTED)


@pytest.fixture
def engine():
    """Its answers have begun, and go on when a test says so."""
    engine = FakeEngine(lambda request: says("ab")[:1])
    yield engine
    engine.close()


@contextmanager
def fronted(engine, context, tmp_path):
    """A front over the engine and its address. No thread of it is left: one that freed the engine's tensors while Python ends would abort."""
    before = {*threading.enumerate()}
    bound = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with FrontProcess(engine, bound, Settings(folder(tmp_path), "tiny"), context) as front:
        yield front, url
    assert {*threading.enumerate()} <= before


@contextmanager
def streaming(url):
    """A client, and an answer of which it has the beginning."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        running = client.completions.create(model="tiny", prompt="x", stream=True)
        assert next(running).choices[0].text == "a"
        yield client, running


def wait(front, engine, meanwhile):
    """As the main thread waits, while another does something. A mistake of this one ends the front."""

    def watched():
        try:
            assert engine.watched.wait(30)
            meanwhile()
        except BaseException:
            front._process.kill()
            raise

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(watched)
        try:
            front.wait()
        finally:
            done.result()


def test_sigterm_lets_running_answers_end_and_refuses_new_ones(engine, context, tmp_path):
    def client():
        with streaming(url) as (client, running):
            os.kill(os.getpid(), signal.SIGTERM)
            engine.until(lambda e: e.draining)
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="y")
            assert caught.value.status_code == 503 and caught.value.code == "draining"
            assert httpx.get(f"{url}/ready").status_code == 503 and httpx.get(f"{url}/health").status_code == 200
            engine.streams[0].put(*says("ab")[1:])
            assert text_of(running) == "b"

    with fronted(engine, context, tmp_path) as (front, url):
        wait(front, engine, client)
        assert front._process.exitcode == 0


def test_a_second_signal_ends_it_at_once(engine, context, tmp_path):
    def client():
        with streaming(url) as (_, running):
            os.kill(os.getpid(), signal.SIGINT)
            engine.until(lambda e: e.draining)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                list(running)

    with fronted(engine, context, tmp_path) as (front, url):
        wait(front, engine, client)


def test_a_signal_that_does_not_wake_the_main_thread_is_heard(engine, context, tmp_path):
    """As one that comes between its last instruction and its wait; here another thread has it."""

    def client():
        inside = lambda: sys._current_frames()[threading.main_thread().ident].f_code.co_name
        for _ in range(3000):
            if inside() == "select":
                break
            time.sleep(0.01)
        assert inside() == "select"
        time.sleep(0.1)  # it waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        engine.until(lambda e: e.draining)

    with fronted(engine, context, tmp_path) as (front, _):
        wait(front, engine, client)
        assert front._process.exitcode == 0


def test_a_front_that_dies_ends_the_server(engine, context, tmp_path):
    with fronted(engine, context, tmp_path) as (front, _):
        with pytest.raises(ChildProcessError, match="the front's process has ended by signal 9"):
            wait(front, engine, front._process.kill)


def test_an_engine_that_dies_ends_the_server_and_its_clients_hear_why(engine, context, tmp_path):
    def client():
        with streaming(url) as (_, running):
            engine.fail("illegal memory access")
            with pytest.raises(openai.APIError, match="illegal memory access"):
                list(running)

    with fronted(engine, context, tmp_path) as (front, url):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            wait(front, engine, client)
        assert front._process.exitcode == 0


def test_a_front_that_cannot_begin_ends_the_server(engine, context, tmp_path):
    bound = listen("127.0.0.1", 0)
    with pytest.raises(ChildProcessError, match="with status 1"):
        with FrontProcess(engine, bound, Settings(tmp_path / "nowhere", "tiny"), context):
            pass


def test_a_front_whose_engines_process_is_gone_tells_its_clients_and_ends(context, tmp_path):
    ours, theirs = multiprocessing.Pipe()
    bound = listen("127.0.0.1", 0)
    arguments = theirs, bound, 256, 300, Settings(folder(tmp_path), "tiny")
    process = context.Process(target=http.main, args=arguments)
    process.start()
    theirs.close()
    assert ours.recv() == Ready()
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "x"}
        asked = pool.submit(httpx.post, f"http://127.0.0.1:{bound.getsockname()[1]}/v1/completions", json=body)
        assert ours.recv().requests[0].prompt == (120,)
        ours.close()
        answer = asked.result()
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "the process of the engine has ended"
    process.join(30)
    assert process.exitcode == 1
