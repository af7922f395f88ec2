"""The ranks of a run and how they are laid out: a mesh of shard × sequence × tensor, or one process and no group at all.

What a rank holds: rows of each batch by its place on "shard" (the weights are sharded over it too), tokens of each row by its
place on "sequence", heads and columns of the weights by its place on "tensor". Knows nothing of models.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from needlework.fields import Count, fit

T = TypeVar("T")
AXES = ("shard", "sequence", "tensor")
# one rank may read text for longer than PyTorch lets the others wait; one that dies is noticed at once all the same
PATIENCE = timedelta(days=7)
LATE = 60  # seconds: storage on a network may show what another host wrote only after a while


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many ranks share what; shard × sequence × tensor is the number of ranks.

    shard: parts of the batch and of the weights (FSDP2); -1 takes all ranks that the others leave.
    sequence: segments of every sequence, states passed on from rank to rank.
    tensor: parts of every large matrix.
    Raises ValueError for a count below 1.

    >>> from needlework.train import Parallel
    >>> Parallel(sequence=2).sizes(8)  # shard, sequence, tensor of eight ranks
    (4, 2, 1)
    """

    shard: Count | Literal[-1] = -1
    sequence: Count = 1
    tensor: Count = 1

    def __post_init__(self):
        fit("parallel", self)

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """shard, sequence, tensor for so many ranks; ValueError if they do not multiply to it."""
        others = self.sequence * self.tensor
        shard = ranks // others if self.shard == -1 else self.shard
        if shard * others != ranks:
            raise ValueError(
                f"{self} on {ranks} rank{'s'[: ranks > 1]}: shard × sequence × tensor must be {ranks}; "
                "`torchrun --nproc-per-node`, or --ranks, says how many there are"
            )
        return shard, self.sequence, self.tensor


class World:
    """All ranks of the run and this one's place among them. `World.open` makes it; `World(device)` is one process alone.

    patient: a group of all ranks in which one works for hours while the others wait.
    """

    def __init__(
        self, device: torch.device | None = None, mesh: DeviceMesh | None = None, patient: dist.ProcessGroup | None = None
    ):
        self.device, self.mesh, self.patient = device, mesh, patient  # device None: wherever the model is
        self.shard, self.sequence, self.tensor = (1, 1, 1) if mesh is None else tuple(mesh.shape)
        self.rank = 0 if mesh is None else dist.get_rank()

    @classmethod
    def open(cls, parallel: Parallel = Parallel()) -> "World":
        """Joins the ranks that torchrun started (its RANK, WORLD_SIZE, …); without them, or with one, there is no group.

        A process group that is there already is taken as it is. One GPU a rank where there are GPUs, by LOCAL_RANK; the CPU
        elsewhere. ValueError if the sizes do not multiply to the number of ranks, or a rank finds no GPU of its own.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        sizes = parallel.sizes(ranks)
        if ranks == 1:
            return cls()
        device, backend = torch.device("cpu"), "gloo"
        if torch.cuda.is_available():
            local = int(os.environ["LOCAL_RANK"])
            if local >= torch.cuda.device_count():
                raise ValueError(f"rank {local} of this host has no GPU: there are {torch.cuda.device_count()}")
            device, backend = torch.device("cuda", local), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group(backend)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        patient: Any = dist.new_group(backend="gloo", timeout=PATIENCE)  # every rank is a member, so it is a ProcessGroup
        return cls(device, mesh, patient)

    @property
    def ranks(self) -> int:
        return self.shard * self.sequence * self.tensor

    @property
    def parts(self) -> int:
        """How many ranks hold tokens of their own."""
        return self.shard * self.sequence

    @property
    def part(self) -> int:
        """Which of them this rank is; the same on all ranks of "tensor"."""
        return self.rank // self.tensor

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, x: Tensor) -> Tensor:
        """x summed over all ranks, in place, on its device."""
        if self.mesh is not None:
            dist.all_reduce(x)
        return x

    def total(self, number: float) -> float:
        """The sum over the ranks that hold tokens of their own; of whole numbers a whole one."""
        if self.mesh is None:
            return number
        total = self.sum_(torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)).item()
        return total // self.tensor if isinstance(number, int) else total / self.tensor

    def any(self, flag: bool) -> bool:
        return flag if self.mesh is None else self.total(int(flag) * self.tensor) > 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order, on every rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def agree(self, ask: Callable[[], T]) -> T:
        """What `ask` gives, or raises, on the first rank, which alone asks: on every rank."""
        if self.mesh is None:
            return ask()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = ask()
            except Exception as error:
                answer[1] = error
        dist.broadcast_object_list(answer, group=self.patient)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def share(self, directory: Path) -> None:
        """Makes `directory`, which all ranks write into; ValueError on every rank, with hosts, if it is not one for all of them."""
        if self.mesh is None:
            directory.mkdir(parents=True, exist_ok=True)
            return
        name = self.agree(lambda: _mark(directory))
        seen = self.gather((socket.gethostname(), _appears(directory / name)))
        if self.is_first:
            (directory / name).unlink()
        blind = [f"rank {rank} on {host}" for rank, (host, appeared) in enumerate(seen) if not appeared]
        if blind:
            raise ValueError(
                f"{directory.absolute()}: what rank 0 on {seen[0][0]} writes there is not seen by {', '.join(blind)}; "
                "expected one directory, on storage that all hosts share"
            )

    def barrier(self) -> None:
        self.any(False)  # over gloo: no GPU waits

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of x [B …]. ValueError if "shard" does not divide B."""
        if x.shape[0] % self.shard:
            raise ValueError(f"batch: {x.shape[0]} rows cannot be dealt to shard = {self.shard} ranks: expected a multiple")
        rows = x.shape[0] // self.shard
        place = self.rank // (self.sequence * self.tensor)
        return x[place * rows : (place + 1) * rows]

    def close(self) -> None:
        """Leave the others; nothing distributed can be done after it."""
        if self.mesh is not None:
            self.barrier()
            dist.destroy_process_group()
            self.mesh = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:  # after an error the others may never come to the barrier; torchrun ends them
            self.close()


def _mark(directory: Path) -> str:
    """The name of a new empty file in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    file, path = tempfile.mkstemp(prefix=".share-", dir=directory)
    os.close(file)
    return Path(path).name


def _appears(path: Path) -> bool:
    end = time.monotonic() + LATE
    while not os.path.exists(path):  # also false where this rank may not look
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def leave(status: int) -> None:
    """End the process now, after its output is out. Several ranks end this way: gloo's threads may abort at interpreter exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
