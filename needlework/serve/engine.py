"""Requests in, events out: one thread that plans steps, launches them and reads what they sampled.

A step is planned and launched before the results of the one before it are read, so that the device never waits for the host. Where a
request has a grammar the next token depends on the last, and the thread reads each step's results first.
"""

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from needlework.serve.interface import DrainingError, GrammarError, QueueFullError, Ringing, Sink
from needlework.serve.matchers import Matcher, Matchers
from needlework.serve.request import Event, Request
from needlework.serve.runner import Runner, Sampled
from needlework.serve.scheduler import Scheduler
from needlework.serve.step import Step, Window
from needlework.serve.stream import Stream


class Stats(NamedTuple):
    """running, waiting: requests now. slots_free, pages_free: of the pools. prompt_tokens, tokens: of requests so far, read and sampled.
    prefix_tokens: of the prompts, those that a snapshot or another answer gave. steps: launched."""

    running: int = 0
    waiting: int = 0
    slots_free: int = 0
    pages_free: tuple[tuple[Window, int], ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0
    prefix_tokens: int = 0
    steps: int = 0


@dataclass(eq=False)
class _Answer:
    """A request that is not over."""

    request: Request
    sink: Sink
    made: int = 0
    asks: bool = field(init=False)  # for more than its tokens

    def __post_init__(self):
        self.asks = self.request.grammar is not None or self.request.sampling.logprobs is not None


class Engine:
    """A runner and a scheduler, and the thread that drives them. Use as a context, or `close` it.

    waiting: so many requests may wait. grammar: makes the matcher of a request's grammar; None: a grammar is refused.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, *, waiting: int = 1024, grammar: Callable[[str], Matcher] | None = None
    ):
        self.length, self.vocabulary = scheduler.config.length, runner.vocabulary
        self._runner, self._scheduler, self._most = runner, scheduler, waiting
        self._answers: dict[str, _Answer] = {}
        self._matchers = Matchers(grammar)
        self._bells: set[Ringing] = set()  # to be rung once the step's events are out
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._arriving = 0  # requests in the inbox
        self._draining = self._closing = False
        self._error: BaseException | None = None
        self._stats = Stats()
        self._thread = threading.Thread(target=self._run, name="needlework engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> Stream:
        """The stream of its events. Raises what `begin` raises."""
        return self.add_all([request])[0]

    def add_all(self, requests: Sequence[Request]) -> list[Stream]:
        """The streams of their events. Raises what `begin` raises."""
        streams = [Stream(request.id, self.cancel) for request in requests]
        self.begin(requests, streams)
        return streams

    def begin(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        """Their events go there; all are taken, or none. A prompt that several have, one after another, is prefilled once. Grammars are
        compiled here, in the thread that asks.

        GrammarError, ValueError for what does not fit, QueueFullError, DrainingError; RuntimeError once the engine has failed.
        """
        for request in requests:
            self._fits(request)
        with self._changed:
            self._takes(requests)
        matchers = self._matchers.compiled(requests)
        with self._changed:
            self._takes(requests)  # others may have come while grammars were compiled
            for request, sink in zip(requests, sinks, strict=True):
                self._answers[request.id] = _Answer(request, sink)
            self._matchers.add(matchers)
            self._arriving += len(requests)
            self._tell(lambda: self._admit(requests))

    def _fits(self, request: Request) -> None:
        tokens = len(request.prompt) + request.max_tokens
        if tokens > self.length:
            raise ValueError(
                f"request: prompt and max_tokens are {len(request.prompt)} + {request.max_tokens} tokens, expected at most {self.length}"
            )
        if max(request.prompt) >= self.vocabulary:
            raise ValueError(f"prompt: token {max(request.prompt)}, expected ids below {self.vocabulary}")

    def _takes(self, requests: Sequence[Request]) -> None:
        """Under the lock: raises where it takes none now."""
        self._check()
        if self._draining:
            raise DrainingError("the server is ending and takes no more requests")
        for id, times in Counter(request.id for request in requests).items():
            if id in self._answers or times > 1:
                raise ValueError(f"request {id!r} is there already")
        if len(requests) > self._most:
            raise ValueError(f"requests: {len(requests)} at once, expected at most {self._most}, as many as may wait")
        if (ahead := self._stats.waiting + self._arriving) + len(requests) > self._most:
            raise QueueFullError(ahead)

    def cancel(self, id: str) -> None:
        """End a request at any stage; nothing for one that is over."""
        with self._changed:
            self._tell(lambda: self._end(id, Event(finish="cancelled")))

    def drain(self) -> None:
        """Takes no more requests."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Until it takes no more requests and those that were there are over. RuntimeError where it has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or (self._draining and not self._answers))
        self._check()

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

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the engine has failed: {self._error}") from self._error

    def _tell(self, act: Callable[[], None]) -> None:
        self._inbox.append(act)
        self._changed.notify_all()

    def _run(self) -> None:
        flights: deque[tuple[Step, Sampled]] = deque()
        try:
            while self._hear_inbox(idle=not flights):
                self._turn(flights)
                self._ring()
            for id in list(self._answers):
                self._end(id, Event(finish="cancelled"))
            self._ring()
        except BaseException as error:  # every client that waits gets it, whatever it is
            with self._changed:
                self._error = error
                for answer in self._answers.values():
                    self._put(answer, Event(finish="error", error=str(error) or type(error).__name__))
                self._answers.clear()
                self._changed.notify_all()
            self._ring()
            raise

    def _turn(self, flights: deque[tuple[Step, Sampled]]) -> None:
        """Launches a step, if there is one, and reads the results of the one before it."""
        if flights and any(self._matchers.bind(step) for step, _ in flights):
            self._finish(*flights.popleft())
            return
        step = self._scheduler.step()
        if step is not None:
            self._launch(step, flights)
        if flights and (step is None or len(flights) > 1):
            self._finish(*flights.popleft())

    def _hear_inbox(self, idle: bool) -> bool:
        """Carries out orders; waits for one where there is nothing else to do. False: the end."""
        with self._changed:
            if idle and not len(self._scheduler):
                self._changed.wait_for(lambda: self._inbox or self._closing)
            acts, closing = list(self._inbox), self._closing
            self._inbox.clear()
        for act in acts:
            act()
        return not closing

    def _admit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            seed = request.sampling.seed
            self._runner.seeds[request.id] = random.getrandbits(62) if seed is None else seed
        self._scheduler.add(*requests)
        self._count(prompt_tokens=sum(len(request.prompt) for request in requests))
        with self._changed:
            self._arriving -= len(requests)

    def _launch(self, step: Step, flights: deque[tuple[Step, Sampled]]) -> None:
        bits = self._matchers.bits(step)
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
        tokens: dict[str, int] = {}
        over: dict[str, Event] = {}
        for row, (request, token) in enumerate(zip(sampled.requests, sampled.tokens.tolist(), strict=True)):
            if request is None:
                continue
            tokens[request.id] = token
            answer = self._answers.get(request.id)
            if answer is None or answer.request is not request:  # over since, and another may have its id
                continue
            answer.made += 1
            event = Event(token)
            if answer.asks or token in request.stop_tokens or answer.made == request.max_tokens:
                event = self._event(answer, sampled, row, token)
            if event.finish is None:
                self._put(answer, event)
            else:
                over[request.id] = event
        self._scheduler.done(step, tokens, over.keys())
        self._count(tokens=len(tokens))
        for id, event in over.items():
            self._end(id, event, forgotten=True)

    def _event(self, answer: _Answer, sampled: Sampled, row: int, token: int) -> Event:
        request, finish = answer.request, None
        try:
            ended = self._matchers.take(request.id, token)
        except GrammarError as error:  # the answer so far does not match: it must not look as if it were whole
            return Event(finish="refused", error=str(error))
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

    def _put(self, answer: _Answer, event: Event) -> None:
        bell = answer.sink.put(event)
        if bell is not None:
            self._bells.add(bell)

    def _ring(self) -> None:
        while self._bells:
            self._bells.pop().ring()

    def _end(self, id: str, event: Event, forgotten: bool = False) -> None:
        """A request is over, with its last event. forgotten: the scheduler knows."""
        if not forgotten:
            self._scheduler.cancel(id)
        self._runner.seeds.pop(id, None)
        self._count()
        with self._changed:
            answer = self._answers.pop(id, None)
            self._matchers.drop(id)
            self._changed.notify_all()
        if answer is not None:
            self._put(answer, event)

    def _count(self, **more: int) -> None:
        """The numbers as they are now, and `more` of what is counted."""
        scheduler, before = self._scheduler, self._stats
        self._stats = before._replace(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots_free=scheduler.memory.slots.free,
            pages_free=tuple((window, pool.free) for window, pool in scheduler.memory.pages.items()),
            **{name: getattr(before, name) + n for name, n in more.items()},
        )
