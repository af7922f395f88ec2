"""Requests in, events out: one thread that plans steps, launches them and hears what they sampled.

A step is planned and launched before the one before it has been heard, so that the device never waits for the host. Where a request
has a grammar the next token depends on the last, and the thread hears each step first.
"""

import asyncio
import queue
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from needlework.serve.interface import DrainingError, QueueFullError
from needlework.serve.request import Event, Request
from needlework.serve.runner import Runner, Sampled
from needlework.serve.scheduler import Scheduler
from needlework.serve.step import Step, Window


class Stats(NamedTuple):
    """running, waiting: requests now. slots_free, pages_free: of the pools. prompt_tokens, tokens: of requests so far, read and sampled.
    prefix_tokens: of the prompts, those that a snapshot gave. steps: launched."""

    running: int = 0
    waiting: int = 0
    slots_free: int = 0
    pages_free: tuple[tuple[Window, int], ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0
    prefix_tokens: int = 0
    steps: int = 0


class Matcher(Protocol):
    """A request's way through its grammar."""

    def bits(self) -> Tensor:
        """[⌈V/32⌉] int32: a bit for each token that may come next."""

    def take(self, token: int) -> bool:
        """Go on by a token; whether the grammar is then at its end."""


class Stream:
    """The events of one request, from any thread or from asyncio; the last has `finish`."""

    def __init__(self, id: str, cancel: Callable[[str], None]):
        self.id, self._cancel = id, cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._heard: Callable[[], None] = lambda: None

    def put(self, event: Event) -> None:
        self._events.put(event)
        self._heard()

    def cancel(self) -> None:
        """The request ends within a step; its last event says so."""
        self._cancel(self.id)

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if event.finish is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        self._heard = lambda: _tell(loop, there)
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                await there.wait()
                there.clear()
                continue
            yield event
            if event.finish is not None:
                return


def _tell(loop: asyncio.AbstractEventLoop, there: asyncio.Event) -> None:
    with suppress(RuntimeError):  # whoever listened is gone, and its loop is closed
        loop.call_soon_threadsafe(there.set)


@dataclass(eq=False)
class _Answer:
    """A request that is not over."""

    request: Request
    stream: Stream
    matcher: Matcher | None
    made: int = 0


class Engine:
    """A runner and a scheduler, and the thread that drives them. Use as a context, or `close` it.

    waiting: so many requests may wait. grammar: makes the matcher of a request's grammar; None: a grammar is refused.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, *, waiting: int = 1024, grammar: Callable[[str], Matcher] | None = None
    ):
        self.length, self.vocabulary = scheduler.config.length, runner.vocabulary
        self._runner, self._scheduler, self._grammar, self._most = runner, scheduler, grammar, waiting
        self._answers: dict[str, _Answer] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._draining = self._closing = False
        self._error: BaseException | None = None
        self._stats = Stats()
        self._thread = threading.Thread(target=self._run, name="needlework engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> Stream:
        """The stream of its events. ValueError for what does not fit, QueueFullError, DrainingError; RuntimeError once the engine has failed."""
        matcher = None
        tokens = len(request.prompt) + request.max_tokens
        if tokens > self.length:
            raise ValueError(
                f"request: prompt and max_tokens are {len(request.prompt)} + {request.max_tokens} tokens, expected at most {self.length}"
            )
        if max(request.prompt) >= self.vocabulary:
            raise ValueError(f"prompt: token {max(request.prompt)}, expected ids below {self.vocabulary}")
        if request.grammar is not None:
            if self._grammar is None:
                raise ValueError("grammar: this engine was made without one")
            matcher = self._grammar(request.grammar)
        with self._changed:
            if self._error is not None:
                raise RuntimeError(f"the engine has failed: {self._error}") from self._error
            if self._draining:
                raise DrainingError("the server is ending and takes no more requests")
            if request.id in self._answers:
                raise ValueError(f"request {request.id!r} is there already")
            if (ahead := self._stats.waiting + len(self._inbox)) >= self._most:
                raise QueueFullError(ahead)
            stream = Stream(request.id, self.cancel)
            self._answers[request.id] = _Answer(request, stream, matcher)
            self._tell(lambda: self._begin(request))
        return stream

    def cancel(self, id: str) -> None:
        """End a request at any stage; nothing for one that is over."""
        with self._changed:
            self._tell(lambda: self._end(id, Event(finish="cancelled")))

    def drain(self) -> None:
        """Takes no more requests, and returns when those that are there are over."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: not self._answers or self._error is not None)

    def close(self) -> None:
        """Cancels what is there and ends the thread."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> Stats:
        return self._stats

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, act: Callable[[], None]) -> None:
        self._inbox.append(act)
        self._changed.notify_all()

    def _run(self) -> None:
        flights: deque[tuple[Step, Sampled]] = deque()
        try:
            while self._hear_inbox(idle=not flights):
                if flights and any(self._constrained(step) for step, _ in flights):
                    self._finish(*flights.popleft())
                    continue
                step = self._scheduler.step()
                if step is not None:
                    self._launch(step, flights)
                if flights and (step is None or len(flights) > 1):
                    self._finish(*flights.popleft())
            for id in list(self._answers):
                self._end(id, Event(finish="cancelled"))
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            with self._changed:
                self._error = error
                for answer in self._answers.values():
                    answer.stream.put(Event(finish="error", error=str(error) or type(error).__name__))
                self._answers.clear()
                self._changed.notify_all()
            raise

    def _hear_inbox(self, idle: bool) -> bool:
        """Does what was asked for; waits for it where nothing else is to be done. False: the end."""
        with self._changed:
            if idle and not len(self._scheduler):
                self._changed.wait_for(lambda: self._inbox or self._closing)
            acts, closing = list(self._inbox), self._closing
            self._inbox.clear()
        for act in acts:
            act()
        return not closing

    def _begin(self, request: Request) -> None:
        seed = request.sampling.seed
        self._runner.seeds[request.id] = random.getrandbits(62) if seed is None else seed
        self._scheduler.add(request)
        self._count(prompt_tokens=len(request.prompt))

    def _launch(self, step: Step, flights: deque[tuple[Step, Sampled]]) -> None:
        bits = {
            one.request.id: matcher.bits()
            for one in (*step.decodes, *(one for one in step.prefills if one.last))
            if (matcher := self._matcher(one.request.id)) is not None
        }
        try:
            flights.append((step, self._runner.run(step, bits)))
        except torch.OutOfMemoryError as error:
            while flights:
                self._finish(*flights.popleft())
            torch.cuda.empty_cache()
            request = self._scheduler.failed(step)
            if request is not None:
                self._end(request.id, Event(finish="error", error=f"out of memory: {error}"), forgotten=True)
        self._count(steps=1, prefix_tokens=sum(one.borrowed for one in step.admitted))

    def _finish(self, step: Step, sampled: Sampled) -> None:
        """What a step has sampled goes to its streams."""
        sampled.wait()
        drawn = sampled.tokens.tolist()
        whose = list(zip(sampled.requests, drawn, strict=True))
        tokens = {request.id: token for request, token in whose if request is not None}
        over: dict[str, Event] = {}
        for row, (request, token) in enumerate(whose):
            if request is None:
                continue
            answer = self._answers.get(request.id)
            if answer is None or answer.request is not request:  # over since, and another may have its id
                continue
            event = self._event(answer, sampled, row, token)
            if event.finish is None:
                answer.stream.put(event)
            else:
                over[request.id] = event
        self._scheduler.done(step, tokens, set(over))
        self._count(tokens=len(tokens))
        for id, event in over.items():
            self._end(id, event, forgotten=True)

    def _event(self, answer: _Answer, sampled: Sampled, row: int, token: int) -> Event:
        answer.made += 1
        request, finish = answer.request, None
        ended = answer.matcher is not None and answer.matcher.take(token)
        if token in request.stop_tokens or ended:
            finish = "stop"
        elif answer.made == request.max_tokens:
            finish = "length"
        wanted = request.sampling.logprobs
        if wanted is None or sampled.chances is None:
            return Event(token=token, finish=finish)
        own, which, theirs = (x[row] for x in sampled.chances)
        best = zip(which[:wanted].tolist(), theirs[:wanted].tolist(), strict=True)
        return Event(token=token, finish=finish, logprob=float(own), top=tuple(best))

    def _end(self, id: str, event: Event, forgotten: bool = False) -> None:
        """A request is over, with its last event. forgotten: the scheduler knows."""
        if not forgotten:
            self._scheduler.cancel(id)
        self._runner.seeds.pop(id, None)
        self._count()
        with self._changed:
            answer = self._answers.pop(id, None)
            self._changed.notify_all()
        if answer is not None:
            answer.stream.put(event)

    def _constrained(self, step: Step) -> bool:
        return any(self._matcher(one.request.id) is not None for one in (*step.decodes, *step.prefills))

    def _matcher(self, id: str) -> Matcher | None:
        answer = self._answers.get(id)
        return None if answer is None else answer.matcher

    def _count(self, **more: int) -> None:
        """The numbers as they are now, and `more` of what is counted."""
        scheduler, before = self._scheduler, self._stats
        self._stats = before._replace(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots_free=scheduler.slots.free,
            pages_free=tuple((window, pool.free) for window, pool in scheduler.pages.items()),
            **{name: getattr(before, name) + n for name, n in more.items()},
        )
