"""LUCID's solve, LUCID as attention, Polar and PaTH attention at the shapes of the papers' models. H counts key-value heads."""

import dataclasses
from collections.abc import Callable
from functools import partial

import peers
import torch
from cases import SHAPES, Case, draws, spec_of
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from needlework.layers.softmax import softmax_attention
from needlework.ops.api import Impl, OpSpec
from needlework.ops.common.packing import document_positions


def lucid_inputs(
    generator: torch.Generator, B: int, T: int, H: int, K: int, V: int, *, clustered: bool = False, queries: int = 0
) -> dict[str, Tensor]:
    """Normal keys, or keys in eight tight clusters; normal values, and queries of so many heads."""
    normal, uniform = draws(generator)
    k = normal(B, T, H, K)
    if clustered:
        k = normal(8, K)[(8 * uniform(B, T, H)).long()] + 0.05 * k
    return ({"q": normal(B, T, queries, K)} if queries else {}) | {"k": k, "v": normal(B, T, H, V)}


def polar_inputs(
    generator: torch.Generator, B: int, T: int, H: int, K: int, V: int, *, queries: int | None = None
) -> dict[str, Tensor]:
    """Queries and keys of norm √d, parameters where the layer starts them. Four query heads a group, or so many in all."""
    normal, _ = draws(generator)
    long = lambda x: K**0.5 * normalize(x, dim=-1)
    Hq = 4 * H if queries is None else queries
    x = {"q": long(normal(B, T, Hq, K)), "k": long(normal(B, T, H, K)), "v": normal(B, T, H, V)}
    start = {"alpha": -1.0, "beta": -1.5, "gamma": 0.5, "null_base": 2.0}
    return x | {name: at + 0.1 * normal(Hq) for name, at in start.items()} | {"v_null": 0.3 * normal(Hq, V)}


def path_inputs(
    generator: torch.Generator, B: int, T: int, H: int, K: int, V: int, *, queries: int | None = None
) -> dict[str, Tensor]:
    """Queries of four heads a group, or of so many in all, unit directions, and β all over its range."""
    normal, uniform = draws(generator)
    x = {"q": normal(B, T, 4 * H if queries is None else queries, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    return x | {"beta": 2 * uniform(B, T, H), "w": normalize(normal(B, T, H, K), dim=-1)}


def forgetting_inputs(generator: torch.Generator, *sizes: int, queries: int | None = None) -> dict[str, Tensor]:
    """PaTH's with forget gates, half of which keep more than e^-0.02 of what their token sees."""
    x = path_inputs(generator, *sizes, queries=queries)
    normal, _ = draws(generator)
    return x | {"g": logsigmoid(normal(*x["q"].shape[:3]) + 4)}


def wide_transitions(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """w and β in float32, which the peer asserts."""
    return x | {name: x[name].float() for name in ("w", "beta")}


def unit_keys(x: dict[str, Tensor]) -> dict[str, Tensor]:
    k = x["k"].float()
    return x | {"k": (k.shape[-1] ** 0.5 * normalize(k, dim=-1)).to(x["k"])}


def expanded(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k and v alone, a key-value head for every query head."""
    G = x["q"].shape[2] // x["k"].shape[2]
    return {"q": x["q"]} | {name: x[name].repeat_interleave(G, 2) for name in "kv"}


def read_by_softmax(
    solve: Callable[..., tuple], q: Tensor, k: Tensor, v: Tensor, operand=lambda x: x, cu_seqlens: Tensor | None = None, **_
) -> tuple:
    """Causal attention on solved values in each document, literally; every operand of a product is rounded once."""
    G = q.shape[2] // k.shape[2]
    y = solve(k, v, operand=operand, cu_seqlens=cu_seqlens).y
    q, k, y = (operand(x).transpose(1, 2) for x in (q, k.repeat_interleave(G, 2), y.repeat_interleave(G, 2)))
    scores = q @ k.mT * k.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    if cu_seqlens is not None:
        document, _ = document_positions(cu_seqlens, q.shape[2])
        hidden |= document[:, None] != document
    return (operand(scores.masked_fill(hidden, float("-inf")).softmax(-1)) @ y).transpose(1, 2), None


def lucid_attention() -> OpSpec:
    """The layer's path: the solve by kernels, then the fastest attention there is."""
    lucid = spec_of("lucid")

    def fast(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, impl: Impl = "triton", **_) -> tuple:
        y = lucid.chunk(k, v, cu_seqlens=cu_seqlens, impl=impl).y
        return softmax_attention(q, k, y, cu_seqlens=cu_seqlens)

    forms = {form: partial(read_by_softmax, getattr(lucid, form)) for form in ("recurrent", "literal")}
    return dataclasses.replace(lucid, chunk=fast, tokens=("q", "k", "v"), half=("q", "k", "v"), **forms)


def _lucid(at: str, bars: dict[str, float], *, clustered: bool = False, share: float | None = None) -> Case:
    T, K, V = (SHAPES[at][axis] for axis in "TKV")
    return Case(
        op="lucid/clustered" if clustered else "lucid",
        at=at,
        spec=spec_of("lucid"),
        inputs=partial(lucid_inputs, clustered=clustered),
        peer=peers.SOLVE if share is None else None,
        peer_inputs=unit_keys,
        bars=bars,
        share=share,
        flops=T * (K + V),
        numbers=K + 2 * V,
    )


def _lucid_attention(at: str, bars: dict[str, float]) -> Case:
    T, H, K, V = (SHAPES[at][axis] for axis in "THKV")
    G = 32 // H
    return Case(
        op="lucid/attention",
        at=at,
        spec=lucid_attention(),
        inputs=partial(lucid_inputs, queries=32),
        peer=peers.CUDNN,
        peer_inputs=expanded,
        bars=bars,
        flops=(G + 1) * T * (K + V),
        numbers=G * (K + V) + K + V,
    )


def _polar(at: str, op: str = "polar", peer: peers.Peer = peers.FLASH, fwd: float = 0.7, both: float = 0.85) -> Case:
    T, K, V = (SHAPES[at][axis] for axis in "TKV")
    return Case(
        op=op,
        at=at,
        spec=spec_of("polar"),
        inputs=polar_inputs,
        peer=peer,
        peer_inputs=expanded,
        bars={"fwd": fwd, "fwd+bwd": both},
        flops=4 * T * (K + V),
        numbers=5 * (K + V),
    )


def _path(at: str) -> Case:
    """A head of 128 is over what the peer's assertion lets through in the versions that were read; then it is timed alone."""
    T, K, V = (SHAPES[at][axis] for axis in "TKV")
    return Case(
        op="path",
        at=at,
        spec=spec_of("path"),
        inputs=path_inputs,
        peer=peers.PATH,
        peer_inputs=wide_transitions,
        bars={"fwd": 0.6, "fwd+bwd": 0.6},
        flops=4 * T * (K + V),
        numbers=6 * K + 5 * V,
    )


def lucid_path_inputs(*sizes) -> dict[str, Tensor]:
    """PaTH's without queries."""
    x = path_inputs(*sizes)
    del x["q"]
    return x


def _lucid_path(at: str) -> Case:
    """The solve alone; its read is PaTH's rows. No other implementation of it is published as code that runs."""
    T, K, V = (SHAPES[at][axis] for axis in "TKV")
    return Case(
        op="path/lucid",
        at=at,
        spec=spec_of("path/lucid"),
        inputs=lucid_path_inputs,
        peer=None,
        flops=T * (K + V),
        numbers=5 * K + 4 * V,
    )


CASES = (
    _lucid("kv4-8K", {"fwd": 0.02, "fwd+bwd": 0.04}),
    _lucid("kv4-8K", {"fwd": 0.02, "fwd+bwd": 0.04}, clustered=True),
    _lucid("kv32-8K", {"fwd": 0.1, "fwd+bwd": 0.17}),
    _lucid("kv4-d128", {}, share=0.42),
    _lucid_attention("kv4-8K", {"fwd+bwd": 1.15}),
    _lucid_attention("kv4-32K", {"fwd+bwd": 1.15}),
    _lucid_attention("kv32-8K", {"fwd+bwd": 2.6}),
    _lucid_attention("kv8-4K-d128", {"fwd": 1.25, "fwd+bwd": 1.25}),
    _polar("2K"),
    _polar("16K"),
    _polar("64K"),
    _polar("16K", "polar/cudnn", peers.CUDNN, 1.1, 1.2),
    _path("kv8-4K"),
    _path("kv8-16K"),
    _path("kv8-4K-d128"),
    _path("kv8-16K-d128"),
    _lucid_path("kv8-4K"),
    _lucid_path("kv8-16K"),
    _lucid_path("kv8-4K-d128"),
    _lucid_path("kv8-16K-d128"),
)
