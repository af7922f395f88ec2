"""FSDP by hand: PyTorch's `fully_shard` around modules with mixers, two processes on a CPU.

You learn: a mixer is an ordinary module, so `fully_shard` shards a model mixer by mixer. Each rank reads its rows, divides its loss by the
tokens of all ranks and sums gradients; the losses are then those of one process, which is asserted. On GPUs: "nccl" instead of "gloo",
and torchrun to start the ranks. (`needlework train` does this by itself: `--set train.parallel.shard=2`.)
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from needlework.layers import build

RANKS, DIM, VOCABULARY, LENGTH, ROWS, STEPS = 2, 32, 64, 16, 4, 5


class Model(nn.Module):
    """Q-Delta, then LUCID. The same weights on every rank: each makes them whole, then keeps its shard."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.mixers = nn.ModuleList(build(name, dim=DIM, heads=2) for name in ("qdelta", "lucid"))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for mixer in self.mixers:
            x = x + mixer(F.rms_norm(x, (DIM,)))[0]
        return self.head(x)


def train(model: nn.Module, rank: int, ranks: int) -> list[float]:
    """The losses of STEPS steps, each over all ROWS rows, of which this rank has its share."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (ROWS, 1), generator=draw) + torch.arange(LENGTH + 1)
        mine = (tokens % VOCABULARY).chunk(ranks)[rank]
        logits = model(mine[:, :-1]).transpose(1, 2)
        loss = F.cross_entropy(logits, mine[:, 1:], reduction="sum") / (ROWS * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def member(rank: int, folder: str) -> None:
    """One of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh, model = init_device_mesh("cpu", (RANKS,)), Model()
    for mixer in model.mixers:
        fully_shard(mixer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the loss is divided by all tokens already: sum, do not average
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    held = sum(p.to_local().numel() for p in model.parameters())
    losses = train(model, rank, RANKS)
    if rank == 0:
        torch.save((losses, held), f"{folder}/result.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that ends by itself


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(member, (folder,), nprocs=RANKS)
        sharded, held = torch.load(f"{folder}/result.pt")
    model = Model()
    whole = sum(p.numel() for p in model.parameters())
    alone = train(model, 0, 1)
    print(f"one process : {', '.join(f'{loss:.4f}' for loss in alone)}")
    print(f"two ranks   : {', '.join(f'{loss:.4f}' for loss in sharded)}; rank 0 holds {held:,} of {whole:,} parameters")
    torch.testing.assert_close(sharded, alone, rtol=1e-4, atol=1e-4)
    assert held < 0.6 * whole and sharded[-1] < sharded[0]


if __name__ == "__main__":
    main()
