"""Inputs for a rule that `needlework doctor` judges, at any sizes."""

from collections.abc import Callable

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.ops.common.samples import decay, keys, normal, uniform, unit
from needlework.ops.specs import specs
from needlework.testing.lucid_decode import LUCID_DECODE
from needlework.testing.lucid_pages import LUCID_PAGES
from needlework.testing.path_pages import PATH_PAGES
from needlework.testing.pieces import PIECES

STYLES = ("random", "identical", "strong")


def judged() -> tuple[OpSpec, ...]:
    """Every spec that a rule may name."""
    return *specs(), *PIECES, *LUCID_PAGES, *LUCID_DECODE, *PATH_PAGES


def spec_of(rule: str) -> OpSpec:
    return next(spec for spec in judged() if spec.name == rule)


def sample(rule: str, generator: torch.Generator, B: int, T: int, style: str, K: int, V: int) -> dict[str, Tensor]:
    """The rule's inputs at these sizes: one key head, and two value heads where its values may be grouped. Attention has two
    key-value heads, and where it has queries two query heads for each.

    Its spec says which arguments there are, and how many axes each has; their names say what they hold.
    """
    if rule.startswith("lucid"):
        return spec_of(rule).inputs(generator, B, T, style, H=2, K=K, V=V)
    if rule.startswith(("polar", "paged")):
        return spec_of(rule).inputs(generator, B, T, style, Hq=4, Hkv=2, d=K, V=V)
    if rule.startswith("path"):
        return spec_of(rule).inputs(generator, B, T, style, Hq=4, Hkv=2, K=K, V=V)
    given = spec_of(rule).inputs(torch.Generator().manual_seed(0), 1, 1, style)
    HV = 1 if "f" in given else 2
    R = given["k"].shape[3] if "k" in given and given["k"].dim() == 5 else 1
    channel = given["g"].dim() == 4 if "g" in given else False
    rank = given["w1"].shape[0] if "w1" in given else 0
    gate = 1 if rule.startswith("ccq") else HV  # CCQ's statistics are of a key head

    def k() -> Tensor:
        rows = keys(generator, B, T * R, 1, K, "clustered" if style == "hard" else style)
        return rows.view(B, T, R, 1, K).transpose(2, 3).contiguous() if R > 1 else rows

    def row_axis(name: str, axes: int) -> list[int]:
        """The axis of rows of an argument that has so many axes with it."""
        return [R] if given[name].dim() == axes else []

    makers: dict[str, Callable[[], Tensor]] = {
        "q": lambda: unit(normal(generator, B, T, 1, *row_axis("q", 5), K)),
        "k": k,
        "v": lambda: normal(generator, B, T, HV, *row_axis("v", 5), V),
        "g": lambda: decay(generator, B, T, gate, *([K] if channel else []), style=style),
        "beta": lambda: uniform(generator, 0.1, 1, B, T, HV),
        "lam": lambda: uniform(generator, 0, 1, B, T, HV),
        "erase": lambda: uniform(generator, 0, 1, B, T, HV, K),
        "write": lambda: uniform(generator, 0, 1, B, T, HV, V),
        "q_read": lambda: unit(normal(generator, B, T, 1, K)),
        "eta": lambda: uniform(generator, 0.02, 0.98, B, T, HV),
        "f": lambda: _preactivation(uniform(generator, -4, 0, B, T, HV, K), generator, style),
        "b": lambda: normal(generator, B, T, HV, K),
        "w": lambda: uniform(generator, -2, 2, B, T, HV) if R == 1 else uniform(generator, -3, -0.5, B, T, HV),
        "A_log": lambda: uniform(generator, -0.5, 0, HV, K),
        "dt_bias": lambda: 0.1 * normal(generator, HV, K),
        "b_bias": lambda: 0.5 * normal(generator, HV, K) - 4,
        "w1": lambda: normal(generator, rank, V),
        "w2": lambda: normal(generator, K, rank),
        "weight": lambda: normal(generator, 2, K, 4),
        "bias": lambda: normal(generator, 2, K),
        "x": lambda: normal(generator, B, T, 2, K) * (1e-3 if style == "strong" else 1),  # so small that 1e-6 counts
        "more": lambda: normal(generator, B, T, 2, K),
        "norm": lambda: 1 + 0.3 * normal(generator, 2, K),
        "gate": lambda: normal(generator, 5 * K, 2, K) / (2 * K) ** 0.5,
        "up": lambda: normal(generator, 5 * K, 2, K) / (2 * K) ** 0.5,
        "dt": lambda: uniform(generator, 0.001, 0.1, B, T, HV),
        "angle": lambda: normal(generator, B, T, K // 4),
        "q_bias": lambda: 1 + 0.3 * normal(generator, HV, *row_axis("q_bias", 3), K),
        "k_bias": lambda: 1 + 0.3 * normal(generator, HV, *row_axis("k_bias", 3), K),
        "mimo_x": lambda: 1 / R + 0.3 * normal(generator, HV, R, V),
    }
    inputs = {name: makers[name]() for name in given}
    if rule == "delta/given":  # the direction is a unit vector, and a share of each of its channels is written along
        direction = inputs["k"]
        share = uniform(generator, 0, 1, *direction.shape)
        inputs |= {"k": share * direction, "erase": direction.repeat_interleave(HV, 2)}
    if style == "hard":
        one = torch.ones_like(inputs["beta"])
        inputs |= {"q": inputs["k"], "g": 0 * one, "beta": one, "lam": one}
    return inputs


def _preactivation(f: Tensor, generator: torch.Generator, style: str) -> Tensor:
    """ "strong": 30 % of the channels' gates near −30 among gates near −1e-3."""
    if style != "strong":
        return f
    return torch.where(uniform(generator, 0, 1, *f.shape) < 0.3, 30.0, -7.0).to(f)


def styles(spec: OpSpec) -> tuple[str, ...]:
    """Those under which every rule is hard to compute, and the spec's own."""
    return tuple(dict.fromkeys((*STYLES, *spec.styles)))
