"""All that changes from step to step, as named tensors: what a checkpoint holds, whichever ranks wrote it.

    model.<name>            weights, and buffers that are kept       optim.<name>.<what>   what the optimisers keep of each
    run.<what>              step, tokens, seconds, losses, …         rng.<rank>.<device>   PyTorch's generators, of every rank

A sharded weight is a DTensor and knows which part of the whole it is, so another number of ranks finds its parts.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .checkpoint import CheckpointError, contents, load
from .world import World


@dataclass
class Run:
    """A model, its optimisers and the history of both. losses, norms: of every step; skipped: steps not applied."""

    model: nn.Module
    optimizers: list[Optimizer]
    world: World
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def state(self) -> dict[str, Tensor]:
        """This rank's part of a checkpoint; the tensors are the live ones."""
        return self._weights() | self._kept_by_optimizers() | self._generators() | self._history()

    def restore(self, path: Path, group: Any) -> bool:
        """Loads the checkpoint directory `path`; False if it has no generators for this number of ranks, which then start anew.

        Raises CheckpointError if it is of another model or optimiser; nothing is changed then.
        """
        there = contents(path)
        weights, history = self._weights(), self._history()
        kept = self._places(there)
        differing = _differing({name: x.shape for name, x in weights.items()}, there, "model.")
        differing += [f"{n}: not trained here" for n in there if n.startswith("optim.") and n not in kept]
        if differing:
            raise CheckpointError(f"{path} is of another model: {'; '.join(differing)}")
        generators = self._generators()
        same = {name for name in there if name.startswith("rng.")} == set(
            name.replace(f"rng.{self.world.rank}.", f"rng.{rank}.") for name in generators for rank in range(self.world.ranks)
        )
        history = {name: torch.empty(there[name][0], dtype=there[name][1]) for name in history}
        load(path, weights | kept | history | (generators if same else {}), group)
        self._give_optimizers(kept)
        step, tokens, self.seconds = (history[f"run.{name}"].item() for name in ("step", "tokens", "seconds"))
        self.step, self.tokens = int(step), int(tokens)
        self.losses, self.norms, self.skipped = (history[f"run.{name}"].tolist() for name in ("losses", "norms", "skipped"))
        if same:
            for name, saved in generators.items():
                torch.set_rng_state(saved) if name.endswith(".cpu") else torch.cuda.set_rng_state(saved, self.device)
        return same

    def seed(self, seed: int) -> None:
        """PyTorch's generators start anew: another stream for each seed, step and rank that holds tokens of its own."""
        digest = hashlib.sha256(f"{seed} {self.step} {self.world.part}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:4]))  # the CPU's generator takes 32 bits

    def _weights(self) -> dict[str, Tensor]:
        """Tied weights once, under their first name."""
        once: dict[int, tuple[str, Tensor]] = {}
        for name, x in self.model.state_dict(keep_vars=True).items():
            once.setdefault(id(x), (name, x))
        return {f"model.{name}": x.detach() for name, x in once.values()}

    def _names(self) -> dict[Tensor, str]:
        return {p: name for name, p in self.model.named_parameters()}

    def _kept_by_optimizers(self) -> dict[str, Tensor]:
        names = self._names()
        return {
            f"optim.{names[p]}.{what}": value
            for optimizer in self.optimizers
            for p, kept in optimizer.state.items()
            for what, value in kept.items()
            if value is not None
        }

    def _places(self, there: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """Room for what a checkpoint holds of the optimisers: placed as the parameter is where it has its shape."""
        places = {}
        for p, name in self._names().items():
            for entry in (entry for entry in there if p.requires_grad and entry.rpartition(".")[0] == f"optim.{name}"):
                size, dtype = there[entry]
                spread = isinstance(p, DTensor) and size == p.shape
                places[entry] = torch.empty_like(p, dtype=dtype).detach() if spread else torch.empty(size, dtype=dtype)
        return places

    def _give_optimizers(self, kept: dict[str, Tensor]) -> None:
        names = self._names()
        by_name: dict[str, dict[str, Tensor]] = {}
        for entry, value in kept.items():
            name, _, what = entry.removeprefix("optim.").rpartition(".")
            by_name.setdefault(name, {})[what] = value
        for optimizer in self.optimizers:
            listed = [names[p] for group in optimizer.param_groups for p in group["params"]]
            state = {i: by_name[name] for i, name in enumerate(listed) if name in by_name}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def _generators(self) -> dict[str, Tensor]:
        found = {f"rng.{self.world.rank}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found[f"rng.{self.world.rank}.cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def _history(self) -> dict[str, Tensor]:
        numbers = {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("seconds", "losses", "norms")}
        counts = {name: torch.tensor(getattr(self, name), dtype=torch.int64) for name in ("step", "tokens", "skipped")}
        return {f"run.{name}": x for name, x in (numbers | counts).items()}


def _differing(here: dict[str, torch.Size], there: dict[str, tuple[torch.Size, torch.dtype]], prefix: str) -> list[str]:
    saved = {name: size for name, (size, _) in there.items() if name.startswith(prefix)}
    size = lambda sizes, name: list(sizes[name]) if name in sizes else "absent"
    return [
        f"{name.removeprefix(prefix)}: {size(saved, name)} there, {size(here, name)} here"
        for name in sorted(saved.keys() | here.keys())
        if saved.get(name) != here.get(name)
    ]
