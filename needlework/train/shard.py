"""A model made ready for its ranks: activations recomputed, blocks compiled, weights sharded; all of it before the first step.

The weights of a sharded model are float32 and stay so: each rank keeps and updates its part, a block's are gathered when it
runs. Autocast then rounds what a matrix product reads, as on one device, so any number of ranks computes the same numbers, and
what layers compute in float32 (gates, norms, decay rates) sees float32 weights. Gathering in bfloat16 instead
(`MixedPrecisionPolicy(param_dtype=…)`) would halve the traffic of a gather and save the rounded copies that autograd keeps,
2 bytes a weight and rank; but it rounds every parameter, and a decay rate of half-life 1,024 by up to 3 %.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from needlework.layers.norm import RMSNorm

from .config import TrainConfig
from .tensor import split_heads
from .world import World

# How Inductor makes kernels of a block; the bytes are in docs/log/2026-11-29-norms-that-read-once.md.
INDUCTOR = {
    # What it computes from more tensors than this, for more than one reader, it writes to memory and reads again; 4 if not said. The
    # gradient of a block's normed input is a sum over its maps, and the norm's backward reads it twice.
    "realize_reads_threshold": 6,
    # Else it orders loops after it has fused them, and what follows a norm by elements, as a rounded copy, gets a kernel of its own.
    "loop_ordering_after_fusion": False,
}

GRAPHS = 16  # of blocks at most: of each kind of layer and each shape, and of the first block, whose stream has one summand; 8 if not said


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of every outermost `ModuleList`: what repeats."""
    found, inside = [], set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(outer) for outer in inside):
            inside.add(name + ".")
            found += module
    return found


def norms(model: nn.Module) -> list[RMSNorm]:
    """Those outside of these lists: the one behind the last block."""
    inside = {module for block in blocks(model) for module in block.modules()}
    return [module for module in model.modules() if isinstance(module, RMSNorm) and module not in inside]


def prepare(model: nn.Module, config: TrainConfig, world: World) -> None:
    """Changes `model` in place as `config` says, and moves it to the rank's device.

    Blocks are compiled one by one: a model of a hundred alike is two compilations, the first block's and the others', and sharding
    gathers weights between them. So is the norm behind them.
    Raises ValueError if activations are to be recomputed by a model that has no `activation_checkpointing_enable`, or in blocks that
    are compiled and split over ranks, and what `split_heads` raises.
    """
    if config.compile and config.recompute and world.tensor > 1:
        raise ValueError("compile, recompute and parallel.tensor > 1: PyTorch cannot compile all three together; leave out one")
    if config.recompute:
        # transformers is about to drop the second name, and its first releases that we take have no other
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
        if enable is None:
            raise ValueError(f"recompute: {type(model).__name__} has no {names[0]}")
        enable({"use_reentrant": False})
    if world.device is not None:
        model.to(world.device)
    if config.compile:
        from torch._dynamo import config as dynamo

        torch.compiler.reset()  # what another run of this process has compiled counts against a limit
        dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    if world.mesh is not None and world.tensor > 1:
        split_heads(model, world.mesh["tensor"])
    if config.compile:
        for part in (*blocks(model), *norms(model)):
            part.compile(fullgraph=True, dynamic=False, options=INDUCTOR)
    if world.mesh is not None and world.shard > 1:
        for module in (*blocks(model), model):
            fully_shard(module, mesh=world.mesh["shard"])
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the loss is divided by the tokens of all ranks already
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def full_state(model: nn.Module) -> dict[str, Any]:
    """The state_dict of a model that may be sharded, whole and on the CPU, on the first rank (empty on others). All ranks call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
