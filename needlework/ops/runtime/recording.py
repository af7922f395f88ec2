"""What a call does on a GPU, step by step, with registers in place of tensors (`recorded.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch._ops import OpOverload

from needlework.ops.runtime import launcher
from needlework.ops.runtime.each import every
from needlework.ops.runtime.replayed import replayed


class Register(int):
    """Number of a tensor of a recording: one that is given, kept, or made."""


Place = tuple[Register, int]  # whose memory, and how far in it


class Step(Protocol):
    """What is done once more, on a stream."""

    def uses(self) -> Iterator[int]: ...
    def makes(self) -> tuple[Register, ...]: ...
    def __call__(self, registers: list[Any], stream: int) -> None: ...


class Allocation(NamedTuple):
    made: Register
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]  # of `empty_on`

    @property
    def bytes(self) -> int:
        """From the first number to the end of the last, of one number or more."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def uses(self) -> Iterator[int]:
        return iter(())

    def makes(self) -> tuple[Register, ...]:
        return (self.made,)

    def __call__(self, registers: list[Any], stream: int) -> None:
        registers[self.made] = self.empty(self.size, self.stride, self.dtype)


def empty_on(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """torch.empty_strided(size, stride, dtype) on a device. On the current GPU by what code of torch.compile's calls, which takes half the
    time; a later PyTorch may not have it."""
    quick = getattr(guards, "_empty_strided_cuda", None)
    if quick is not None and device.type == "cuda" and device.index == torch.cuda.current_device():
        return quick
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


class Call(NamedTuple):
    """Of PyTorch."""

    function: OpOverload
    arguments: tuple
    options: dict[str, Any]
    made: tuple[Register, ...]

    def uses(self) -> Iterator[int]:
        return every(Register, (self.arguments, tuple(self.options.values())))

    def makes(self) -> tuple[Register, ...]:
        return self.made

    def __call__(self, registers: list[Any], stream: int) -> None:
        options = {name: filled(x, registers) for name, x in self.options.items()}
        results = self.function(*filled(self.arguments, registers), **options)
        for register, x in zip(self.made, results if isinstance(results, list | tuple) else (results,), strict=True):
            registers[register] = x


class Address(int):
    """What a descriptor's encoder asks of a tensor."""

    def data_ptr(self) -> int:
        return self


class Tile(NamedTuple):
    """A descriptor of memory without a tensor."""

    base: Address
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str


class Described(NamedTuple):
    """An argument that is a descriptor."""

    place: int
    origin: Register  # whose memory
    offset: int  # how far in it
    rest: tuple  # of a Tile, after its base
    block: dict | None  # of the kernel
    encoded: dict[int, list]  # by address

    def at(self, address: int) -> list:
        found = self.encoded.get(address)
        if found is None:
            if len(self.encoded) >= launcher.ENCODED:
                self.encoded.clear()
            found = self.encoded[address] = launcher.encode(Tile(Address(address), *self.rest), self.block)
        return found


class Launch(NamedTuple):
    """Of a kernel's C function."""

    direct: launcher.Direct
    grid: tuple[int, ...]
    given: list  # its arguments; None in the places of addresses
    addresses: list[tuple[int, Register, int]]  # place, whose memory, how far in it
    described: list[Described]  # from the last, so that places stay right while one takes the room of many
    origins: list[Register]  # whose memory all these are
    known: dict[tuple[int, ...], list]  # arguments by where that lies: an allocator gives the same again and again

    @classmethod
    def of(
        cls, direct: launcher.Direct, grid: tuple[int, ...], given: list, addresses: list[tuple[int, Register, int]], described: list[Described]
    ) -> Launch:  # fmt: skip
        origins = dict.fromkeys([*(origin for _, origin, _ in addresses), *(x.origin for x in described)])
        return cls(direct, grid, given, addresses, described, list(origins), {})

    def elsewhere(self, there: dict[Register, Place]) -> Launch:
        """The same, of memory that is a part of another's now."""
        addresses = [(i, *_moved(origin, offset, there)) for i, origin, offset in self.addresses]
        described = []
        for x in self.described:
            origin, offset = _moved(x.origin, x.offset, there)
            described.append(x._replace(origin=origin, offset=offset))
        return Launch.of(self.direct, self.grid, self.given, addresses, described)

    def uses(self) -> Iterator[int]:
        return iter(self.origins)

    def makes(self) -> tuple[Register, ...]:
        return ()

    def __call__(self, registers: list[Any], stream: int) -> None:
        at = tuple([registers[origin].data_ptr() for origin in self.origins])
        given = self.known.get(at)
        if given is None:
            if len(self.known) >= launcher.ENCODED:
                self.known.clear()
            given = self.known[at] = self.at(dict(zip(self.origins, at, strict=True)))
        self.direct.start(self.grid, stream, given)

    def at(self, at: dict[Register, int]) -> list:
        """Its arguments, by where memory lies."""
        given = self.given.copy()
        for i, origin, offset in self.addresses:
            given[i] = at[origin] + offset
        for x in self.described:
            given[x.place : x.place + 1] = x.at(at[x.origin] + x.offset)
        return given


class Chain(NamedTuple):
    """Launches by the hundred, one behind the other."""

    launches: list[Launch]
    origins: list[Register]  # whose memory all of theirs is
    own: object  # what tells its graphs from those of other chains

    @classmethod
    def of(cls, launches: list[Launch]) -> Chain:
        return cls(launches, list(dict.fromkeys(origin for launch in launches for origin in launch.origins)), object())

    def elsewhere(self, there: dict[Register, Place]) -> Chain:
        return Chain.of([launch.elsewhere(there) for launch in self.launches])

    def uses(self) -> Iterator[int]:
        return iter(self.origins)

    def makes(self) -> tuple[Register, ...]:
        return ()

    def __call__(self, registers: list[Any], stream: int) -> None:
        at = {origin: registers[origin].data_ptr() for origin in self.origins}

        def walk() -> None:
            stream = launcher.current_stream()  # a capture has its own
            for launch in self.launches:
                launch.direct.start(launch.grid, stream, launch.at(at))

        replayed(walk, registers[self.origins[0]].device, lambda: (self.own, *at.values()))


class Recording:
    """Of one call."""

    def __init__(self, kept: list[tuple[Register, Tensor]], count: int, steps: list[tuple[Step, list[int]]], results: Any):
        self.kept, self.count, self.steps, self.results = kept, count, steps, results

    def __call__(self, tensors: list[Tensor]) -> Any:
        registers: list[Any] = [*tensors, *[None] * self.count]
        for register, x in self.kept:
            registers[register] = x
        stream = launcher.current_stream()
        for step, last in self.steps:
            step(registers, stream)
            for register in last:
                registers[register] = None
        return filled(self.results, registers)


def _moved(origin: Register, offset: int, there: dict[Register, Place]) -> Place:
    """A place by `Launch.elsewhere`."""
    whole, first = there.get(origin, (origin, 0))
    return whole, first + offset


def noted(x: Any, register: Callable[[Tensor], Register]) -> Any:
    """The same with registers for tensors."""
    if isinstance(x, Tensor):
        return register(x)
    return _rebuilt(x, [noted(y, register) for y in x]) if isinstance(x, list | tuple) else x


def filled(x: Any, registers: list[Any]) -> Any:
    """The same with tensors for registers."""
    if type(x) is Register:
        return registers[x]
    return _rebuilt(x, [filled(y, registers) for y in x]) if isinstance(x, list | tuple) else x


def _rebuilt(x: list | tuple, parts: list) -> Any:
    if isinstance(x, list):
        return parts
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
