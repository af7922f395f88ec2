"""Operators that are called again and again with arguments of one kind cost the host what their launches cost.

What an operator of ours does on a GPU follows from the shapes, strides, dtypes and numbers that it is given: memory it asks for, calls of
PyTorch, launches. The second call of a kind is recorded, later ones are played back, and the Python that decides does not run again.
Results have memory of their own, as always: a recording knows addresses as distances from what it is given and what it makes. What it makes
for its launches alone is one piece (`arena.py`), a view that it returns is made as it is (`aliases.py`).

It sees what PyTorch dispatches and what `launcher.launch` launches; a function may say that launches are one chain. A function that
reads numbers on the host is seen too, and is then called as it is; what it finds of cu_seqlens by `remembered` lasts as long as its
recordings of that tensor. A function that does something else on a GPU, as calling what torch.compile made, is not to be recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from needlework.ops.common.remembered import remembered
from needlework.ops.runtime import launch_configs, launcher
from needlework.ops.runtime.aliases import View, folded
from needlework.ops.runtime.arena import in_one_piece
from needlework.ops.runtime.custom_op import backward_operator, operator
from needlework.ops.runtime.denylist import denylist
from needlework.ops.runtime.each import every
from needlework.ops.runtime.recording import (
    Allocation,
    Call,
    Chain,
    Described,
    Launch,
    Recording,
    Register,
    Step,
    empty_on,
    noted,
)

RECORDINGS = 256  # kept of one operator
ONCE, NEVER = object(), object()  # in the place of a recording
aten = torch.ops.aten
EMPTY = (
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip


def recorded_operator(function: Callable) -> OpOverload:
    """`operator`, recorded and played back."""
    return operator(function, recorded)


def recorded_backward_operator(function: Callable) -> OpOverload:
    """`backward_operator`, recorded and played back."""
    return backward_operator(function, recorded)


def recorded(function: Callable) -> Callable:
    """A function of tensors and numbers, which changes nothing that it is given, recorded and played back."""
    places = [i for i, name in enumerate(signature(function).parameters) if name == "cu_seqlens"]
    of_batches: dict[Hashable, Any] = {}
    of_documents = remembered(lambda cu_seqlens: {})

    @wraps(function)
    def call(*arguments: Any) -> Any:
        tensors: list[Tensor] = []
        kind = _kind(arguments, tensors)
        if kind is None:
            return function(*arguments)
        documents = arguments[places[0]] if places else None
        recordings = of_batches if documents is None else of_documents(documents)
        found = recordings.get(kind)
        if type(found) is Recording:
            return found(tensors)
        if found is NEVER:
            return function(*arguments)
        if found is ONCE:
            results, recordings[kind] = _recorded(function, arguments, tensors)
            return function(*arguments) if results is None else results
        if len(recordings) >= RECORDINGS:
            recordings.clear()
        recordings[kind] = ONCE
        return function(*arguments)

    return call


def _recorded(function: Callable, arguments: tuple, tensors: list[Tensor]) -> tuple[Any, Any]:
    """Results, and the recording or NEVER. What is recorded holds all that it makes until it ends: where there is no memory for that, no
    results."""
    recorder = Recorder(tensors)
    try:
        with recorder:
            results = function(*arguments)
    except torch.OutOfMemoryError:
        return None, NEVER
    return results, recorder.recording(results) or NEVER


def _kind(arguments: tuple, tensors: list[Tensor]) -> Hashable | None:
    """All that decides what a function does with these arguments; None where it is not to be recorded. `tensors` gets theirs."""
    if not launcher.calls_directly() or launch_configs.forcing():
        return None
    facts: list[Hashable] = [denylist()]
    for argument in arguments:
        for x in argument if isinstance(argument, list | tuple) else (argument,):
            if not isinstance(x, Tensor):
                facts.append(x)
                continue
            if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
                return None
            facts += x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.get_device()
            tensors.append(x)
    if not tensors or not _on_gpu(tensors[0]):
        return None
    own = [id(x) for x in tensors]
    if len(set(own)) < len(own):
        facts.append(tuple(map(own.index, own)))
    return tuple(facts)


def _on_gpu(x: Tensor) -> bool:
    """Whether kernels launch on this tensor's device, and not into a graph: what a graph reads is its own."""
    return x.is_cuda and x.get_device() == torch.cuda.current_device() and not torch.cuda.is_current_stream_capturing()


class Recorder(TorchDispatchMode):
    """Notes what is done while it is entered. `refused`: that something was done which cannot be done again by a note of it."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.given = len(tensors)
        self.alive: list[Tensor] = []  # so that an id stays one tensor's
        self.registers: dict[int, Register] = {}
        self.origins: list[tuple[Register, int]] = []  # whose memory each has, and how far in it
        self.views: dict[Register, View] = {}
        self.kept: list[tuple[Register, Tensor]] = []
        self.steps: list[Step] = []
        self.encoded: defaultdict[str, dict[int, list]] = defaultdict(dict)  # of descriptors that differ in nothing
        self.passing: set[int] = set()  # memory that is another one at the next call
        self.refused = False
        for x in tensors:
            self._new(x)
            self.passing.add(x.untyped_storage()._cdata)

    def __enter__(self) -> Recorder:
        self.token = launcher.told.set(self)
        return super().__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        launcher.told.reset(self.token)

    def called(self, function: OpOverload, args: tuple, kwargs: dict[str, Any], results: Any) -> None:
        several = results if isinstance(results, list | tuple) else (results,)
        given = list(every(Tensor, (args, tuple(kwargs.values()))))
        if not all(isinstance(x, Tensor) for x in several):
            self.refused |= bool(given)  # a number of a tensor; without one it is of dtypes
            return
        to_host = any(x.is_cpu for x in several) and not all(x.is_cpu for x in given)
        if to_host or torch.Tag.dynamic_output_shape in function.tags:
            self.refused = True
            return
        arguments = noted((args, tuple(kwargs.values())), self.register)
        if function._schema.is_mutable:
            # which of them it changes is not asked
            kept = {register for register, _ in self.kept}
            self.refused |= any(self.origins[self.register(x)][0] in kept for x in given)
        elif function is aten.detach.default:
            self._same(results, args[0])
            return
        elif all(any(x is y for y in given) for x in several):
            return  # a conversion to what it is
        made = tuple(self._result(x, given) for x in several)
        first = several[0]
        if function in EMPTY or (len(several) == 1 and not first.numel()):
            self.steps.append(Allocation(made[0], tuple(first.shape), first.stride(), first.dtype, empty_on(first.device)))
        else:
            self.steps.append(Call(function, arguments[0], dict(zip(kwargs, arguments[1], strict=True)), made))

    def launched(self, direct: launcher.Direct | None, grid: tuple[int, ...], arguments: tuple) -> None:
        if direct is None:
            self.refused = True
            return
        given, addresses, described = list(arguments), [], []
        for i, x in enumerate(arguments):
            if isinstance(x, Tensor):
                given[i] = None if x.data_ptr() else 0  # nothing lies there
                if x.data_ptr():
                    addresses.append((i, *self.origins[self.register(x)]))
        for i, block, _ in direct.descriptors:
            x = arguments[i]
            self.refused |= not x.base.data_ptr()
            given[i] = None  # a descriptor holds its tensor
            rest = x.shape, x.strides, x.block_shape, x.padding
            origin = self.origins[self.register(x.base)]
            described.append(Described(i, *origin, rest, block, self.encoded[repr((origin, rest, block))]))
        self.steps.append(Launch.of(direct, launcher.in_three(grid), given, addresses, described))

    @contextmanager
    def together(self) -> Iterator[None]:
        begun = len(self.steps)
        yield
        made = self.steps[begun:]
        launches = [step for step in made if isinstance(step, Launch)]
        others = [step for step in made if not isinstance(step, Launch)]
        self.steps[begun:] = [*others, *([Chain.of(launches)] if launches else [])]

    def register(self, x: Tensor) -> Register:
        """A tensor that nobody gave and nothing made is kept: the function has it from a call before."""
        found = self.registers.get(id(x))
        if found is None:
            found = self._new(x)
            self.kept.append((found, x))
            # a part of something that is another one at the next call
            self.refused |= x.untyped_storage()._cdata in self.passing
        return found

    def recording(self, results: Any) -> Recording | None:
        """What has been noted, less what `results` do not need; None where it was refused."""
        results = noted(results, self.register)
        if self.refused:
            return None
        returned, kept = set(every(Register, results)), []
        needed = set(returned)
        for step in reversed(self.steps):
            changes = isinstance(step, Launch | Chain) or (isinstance(step, Call) and step.function._schema.is_mutable)
            if changes or needed & set(step.makes()):
                needed |= set(step.uses())
                kept.append(step)
        arena = Register(len(self.origins))
        done = in_one_piece(folded(kept[::-1], returned, self.views), returned, arena)
        later, steps = set(range(self.given)) | {register for register, _ in self.kept} | returned, []
        for step in reversed(done):
            own = {*step.uses(), *step.makes()}
            steps.append((step, sorted(own - later)))
            later |= own
        return Recording(self.kept, arena + 1 - self.given, steps[::-1], results)

    def _new(self, x: Tensor) -> Register:
        register = self.registers.setdefault(id(x), Register(len(self.origins)))
        self.alive.append(x)
        self.origins.append((register, 0))
        return register

    def _same(self, x: Tensor, y: Tensor) -> None:
        """x is y by another name."""
        self.registers[id(x)] = self.register(y)
        self.alive.append(x)

    def _result(self, x: Tensor, given: list[Tensor]) -> Register:
        found = self.registers.get(id(x))
        if found is not None:
            return found
        register, memory = self._new(x), x.untyped_storage()._cdata
        for y in given:
            if y.untyped_storage()._cdata == memory:
                origin, offset = self.origins[self.registers[id(y)]]
                self.origins[register] = origin, offset + x.data_ptr() - y.data_ptr()
                self.views[register] = View(self.origins[register], tuple(x.shape), x.stride(), x.dtype)
                return register
        self.passing.add(memory)
        return register


def _noting(recorder: Recorder, func: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
    token = launcher.told.set(None)  # what an operator launches is the operator's
    try:
        results = func(*args, **(kwargs or {}))
    finally:
        launcher.told.reset(token)
    recorder.called(func, args, kwargs or {}, results)
    return results


# after the class is made: PyTorch would wrap it in what imports torch._dynamo at the first call, which takes longer than many compilations
Recorder.__torch_dispatch__ = _noting  # pyrefly: ignore[bad-assignment]
