"""Optimisers from configs: which parameter gets which rule, by its name and shape.

Names are matched as in a shell ("*embed*"); plain strings, so that a config is data that a checkpoint can hold and compare.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from needlework.fields import Count, NonNegative, Share, fit

from . import muon

Named = Iterable[tuple[str, Parameter]]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW on every parameter.

    Decay (decoupled: times the learning rate) falls on parameters with two axes or more, except those that `undecayed` names:
    norms, biases and other vectors are never decayed, nor are embeddings.
    rates: ((pattern, lr), …), a learning rate of its own for the parameters that a pattern matches; the first match counts.
    Raises ValueError for a number out of its range; in `build`, for a pattern of `rates` that no parameter matches.

    >>> from torch import nn
    >>> from needlework.train import AdamW
    >>> (optimizer,) = AdamW(lr=1e-3, weight_decay=0.1).build(nn.Linear(4, 4).named_parameters())
    >>> sorted(group["weight_decay"] for group in optimizer.param_groups)  # the bias is not decayed
    [0.0, 0.1]
    """

    kind: Literal["adamw"] = "adamw"
    lr: NonNegative
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    undecayed: tuple[str, ...] = ("*embed*",)
    rates: tuple[tuple[str, NonNegative], ...] = ()

    def __post_init__(self):
        fit("adamw", self)

    def build(self, named: Named) -> list[Optimizer]:
        """The optimiser of the trainable parameters in `named`; none if there are none."""
        groups: dict[tuple[float, float, object], list[Parameter]] = {}
        unmatched = {pattern for pattern, _ in self.rates}
        for name, p in named:
            if p.requires_grad:
                pattern, lr = next((rate for rate in self.rates if fnmatchcase(name, rate[0])), (None, self.lr))
                unmatched.discard(pattern)
                bare = p.ndim < 2 or any(fnmatchcase(name, pattern) for pattern in self.undecayed)
                # one kernel takes tensors that lie on one mesh of ranks, or on none
                mesh = getattr(p, "device_mesh", None)
                groups.setdefault((lr, 0.0 if bare else self.weight_decay, mesh), []).append(p)
        if unmatched:
            raise ValueError(f"adamw: rates: no parameter is named {', '.join(sorted(unmatched))}")
        if not groups:
            return []
        # fused: one kernel per group instead of a dozen small operators per parameter; it exists on CPUs too.
        settings = [{"params": p, "lr": lr, "weight_decay": decay} for (lr, decay, _), p in groups.items()]
        return [torch.optim.AdamW(settings, lr=self.lr, betas=tuple(self.betas), eps=self.eps, fused=True)]


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon on the matrices inside blocks, `rest` on every other parameter.

        m ← momentum m + (1 - momentum) G          X₀ = U / ‖U‖_F,  U = (1 - momentum) G + momentum m   (Nesterov)
        X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X         `ns_steps` times, in bfloat16; (a, b, c) = `coefficients`
        W ← (1 - lr weight_decay) W - lr √max(1, rows / cols) X

    matrices: a parameter with two axes whose name matches is a matrix inside a block. The default: every `weight` below a
    numbered module. Other parameters with two axes (one vector or gate per head, say) are no linear maps and go to `rest`.
    Raises ValueError for a number out of its range.

    >>> from torch import nn
    >>> from needlework.train import AdamW, Muon
    >>> blocks = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    >>> named = nn.ModuleDict({"layers": blocks}).named_parameters()
    >>> [type(optimizer).__name__ for optimizer in Muon(lr=0.02, rest=AdamW(lr=1e-3)).build(named)]
    ['Muon', 'AdamW']
    """

    kind: Literal["muon"] = "muon"
    lr: NonNegative
    rest: AdamW
    weight_decay: NonNegative = 0.01
    momentum: Share = 0.95
    coefficients: tuple[float, float, float] = (2.0, -1.5, 0.5)
    ns_steps: Count = 12
    matrices: str = "*.[0-9]*.weight"

    def __post_init__(self):
        fit("muon", self)

    def build(self, named: Named) -> list[Optimizer]:
        """Muon, then `rest`'s optimiser. ValueError if no trainable parameter is a matrix inside a block."""
        matrices, rest = [], []
        for name, p in named:
            inside = p.ndim == 2 and fnmatchcase(name, self.matrices)
            (matrices if inside else rest).append((name, p))
        matrices = [p for _, p in matrices if p.requires_grad]
        if not matrices:
            raise ValueError(f"muon: no trainable parameter with two axes is named {self.matrices}")
        optimizer = muon.Muon(
            matrices,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=True,
            ns_coefficients=tuple(self.coefficients),
            ns_steps=self.ns_steps,
            adjust_lr_fn="original",
        )
        return [optimizer, *self.rest.build(rest)]
