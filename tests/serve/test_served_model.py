"""A model over HTTP, the front in a process of its own: what OpenAI's client hears is what `generate` writes, and what is left is free."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="the extra `test` is not installed")
openai = pytest.importorskip("openai", reason="the extra `test` is not installed")

from needlework.layers import CCQ, Attention, Memory, Polar, QDelta, Recurrent, Rope, Softmax  # noqa: E402
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM  # noqa: E402
from needlework.serve.front_process import FrontProcess  # noqa: E402
from needlework.serve.http import Settings, listen  # noqa: E402
from needlework.serve.request import Request  # noqa: E402
from needlework.serve.text import Text  # noqa: E402
from needlework.testing import processes, ranks  # noqa: E402

from .serving import Serving, generated  # noqa: E402
from .texts import folder  # noqa: E402

ANSWER = 8
EXACT = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model():
    mixers = {
        "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta(), read=CCQ()),
        "S": Attention(heads=2, head_dim=8, attend=Softmax(window=24), position=Rope()),
        "P": Attention(heads=2, head_dim=8, attend=Polar(), memory=Memory()),
    }
    torch.manual_seed(0)
    config = NeedleworkConfig(vocab_size=257, hidden_size=32, layout="QSP", mixers=mixers, initializer_range=0.2)
    return NeedleworkForCausalLM(config).double().eval()


class Gate:
    """Holds the engine's steps after the first `free` ones, until it is opened."""

    def __init__(self, serving, monkeypatch, free):
        self._left, self._open, run = free, threading.Event(), serving.runner.run
        self.open = self._open.set
        monkeypatch.setattr(serving.runner, "run", lambda *step: self._wait() or run(*step))

    def _wait(self):
        self._left -= 1
        if self._left < 0:
            assert self._open.wait(60)


@pytest.fixture
def server(model, tmp_path):
    """A `Serving`, its front, a client, and its tokenizer."""
    bound = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with (
        Serving(model, memory=2_000_000, snapshots=0) as serving,
        FrontProcess(serving.engine, bound, Settings(folder(tmp_path), "tiny"), processes.context(ranks.IMPORTED)) as front,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield serving, front, client, Text.load(tmp_path)


def written(model, prompt, answer=ANSWER):
    """The text that `generate` writes."""
    tokens = generated(model, [Request(id="", prompt=tuple(prompt), max_tokens=answer)])[0]
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def asked(i):
    """How a client asks, what, and how it reads the answer."""
    said, stream = f"client {i} é " * (1 + i % 3), {"stream": bool(i % 2)}
    if i % 4 < 2:
        return "completions", {"prompt": said} | stream
    return "chat", {"messages": [{"role": "user", "content": said}]} | stream


def heard(client, kind, words, answer=ANSWER):
    made = client.completions if kind == "completions" else client.chat.completions
    found = made.create(model="tiny", max_tokens=answer, **words, **EXACT)
    if not words["stream"]:
        return found.choices[0].text if kind == "completions" else found.choices[0].message.content
    pieces = (chunk.choices[0] for chunk in found)
    return "".join(piece.text if kind == "completions" else piece.delta.content or "" for piece in pieces)


def prompt_of(text, kind, words):
    return text.encode(words["prompt"]) if kind == "completions" else text.conversation(words["messages"])


@pytest.mark.parametrize("n", (8, pytest.param(32, marks=pytest.mark.slow)))
def test_clients_at_once_hear_what_generate_writes_and_wrong_ones_their_mistake(server, model, n):
    serving, _, client, text = server

    def wrong(i):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(
                model="tiny", prompt="x" * (155 if i % 2 else 1), max_tokens=ANSWER, temperature=0 if i % 2 else 3
            )
        return caught.value.param

    with ThreadPoolExecutor(40) as pool:
        mistakes = pool.map(wrong, range(4))
        found = list(pool.map(lambda i: heard(client, *asked(i)), range(n)))
        assert [*mistakes] == ["temperature", "max_tokens"] * 2
    assert found == [written(model, prompt_of(text, *asked(i))) for i in range(n)]
    assert serving.all_is_back()


def test_a_client_that_vanishes_leaves_its_slots_and_pages_and_the_others_do_not_notice(server, model, monkeypatch):
    serving, _, client, text = server
    gate, cancel, gone = Gate(serving, monkeypatch, 12), serving.engine.cancel, []
    monkeypatch.setattr(serving.engine, "cancel", lambda id: (gone.append(id), cancel(id), len(gone) == 3 and gate.open()))
    running = client.completions.create(model="tiny", prompt="a client", n=3, max_tokens=100, stream=True, **EXACT)
    with ThreadPoolExecutor(1) as pool:
        next(running)
        other = pool.submit(heard, client, *asked(1))
        running.close()
        assert other.result() == written(model, prompt_of(text, *asked(1)))
    assert serving.engine.stats().tokens < 100 and serving.all_is_back()


def test_sigterm_in_the_middle_lets_every_answer_end_as_generate_writes_it(server, model, monkeypatch):
    serving, front, client, text = server
    gate, watched, wait = Gate(serving, monkeypatch, 6), threading.Event(), serving.engine.wait
    monkeypatch.setattr(serving.engine, "wait", lambda: watched.set() or wait())

    def clients():
        assert watched.wait(60)
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(heard, client, *asked(i)) for i in range(8)]
            while serving.engine.stats().running + serving.engine.stats().waiting < 8:
                time.sleep(1e-3)
            os.kill(os.getpid(), signal.SIGTERM)
            while not serving.engine._draining:
                time.sleep(1e-3)
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="y")
            assert caught.value.status_code == 503 and caught.value.code == "draining"
            gate.open()
            return [answer.result() for answer in answers]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(clients)
        front.wait()
        assert found.result() == [written(model, prompt_of(text, *asked(i))) for i in range(8)]
    assert front._process.exitcode == 0 and serving.all_is_back()
