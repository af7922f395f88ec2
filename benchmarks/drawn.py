"""A drawn call (`draw.py`) as a case: its tensors, the op with its documents and its initial state, and the peer for the same
mathematics."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import peers
import torch
from attention_cases import (
    expanded,
    forgetting_inputs,
    lucid_attention,
    lucid_inputs,
    lucid_path_inputs,
    path_inputs,
    polar_inputs,
    unit_keys,
    wide_transitions,
)
from cases import Case, carve_inputs, draws, inputs, mamba3_inputs, only, spec_of, with_heads, without_content
from draw import Call, operations
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.ops.runtime.launch_configs import rows
from needlework.testing.compare import leaves, like, whole

BEFORE = 100  # tokens that a call with an initial state comes after: inside a chunk, and inside a content chunk
START = "initial_state"
# whose peer reads a group's key head by itself; for the others it gets a head for every value head
READ_GROUPS = (peers.GATED, peers.KDA, peers.PATH)
SOLVED = 1e12  # operations of a solve that its peer, a hundred times slower, is given


class Parts(NamedTuple):
    """A rule of the draw: the launch table that its kernels read (`engine_of`), a call's spec, its inputs by a generator and B, T, H, K, V, HV,
    its peer and what that reads of the inputs."""

    engine: str
    spec: Callable[[Call], OpSpec]
    inputs: Callable[..., dict[str, Tensor]]
    peer: peers.Peer | None = None
    peer_inputs: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict


def _by_gates(generator: torch.Generator, *sizes: int, HV: int) -> dict[str, Tensor]:
    """GDN-2's: a gate of the erase for each channel of a key, of the write for each of a value."""
    x = inputs(generator, *sizes, HV=HV, gate="channel")
    gate = lambda like: torch.sigmoid(draws(generator)[0](*like.shape))
    return x | {"erase": gate(x["g"]), "write": gate(x["v"])}


def _by_direction(generator: torch.Generator, *sizes: int, HV: int) -> dict[str, Tensor]:
    """RWKV-7's: a unit vector is erased, and a share of each of its channels written."""
    x = _by_gates(generator, *sizes, HV=HV)
    direction = x["k"].repeat_interleave(HV // x["k"].shape[2], 2)
    share = torch.sigmoid(draws(generator)[0](*x["k"].shape))
    return x | {"k": share * x["k"], "erase": direction}


def _low_rank(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """S_t = Diag(e^g) S + b (aᵀS) + k vᵀ."""
    return only("q")(x) | {
        "k": x["k"],
        "v": (x["write"] * x["v"]).to(x["v"]),
        "a": (-x["erase"]).to(x["q"]),
        "b": x["k"],
        "gk": x["g"],
    }


def _named(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return only("q", "k", "v", "g")(x) | {"b": x["erase"].to(x["q"]), "w": x["write"].to(x["q"])}


SCALAR, CHANNEL, SHARED = "delta/scalar", "delta/channel", "delta/additive"
_delta = lambda name: lambda call: spec_of(name)
_scalar = only("q", "k", "v", "g", "beta")
PARTS = {
    "gated": Parts(SCALAR, _delta("delta/gated"), partial(inputs, extra=("beta",)), peers.GATED, _scalar),
    "qdelta": Parts(SCALAR, _delta("qdelta"), partial(inputs, extra=("beta", "lam")), peers.COMBA),
    "additive": Parts(SCALAR, _delta("delta/gla"), inputs, peers.SIMPLE_GLA),
    "gla": Parts(CHANNEL, _delta("delta/gla"), partial(inputs, gate="channel"), peers.GLA),
    "kda": Parts(CHANNEL, _delta("delta/kda"), partial(inputs, gate="channel", extra=("beta",)), peers.KDA, _scalar),
    "gdn2": Parts(CHANNEL, _delta("delta/gdn2"), _by_gates, peers.GDN2, _named),
    "given": Parts(CHANNEL, _delta("delta/given"), _by_direction, peers.DPLR, _low_rank),
    "carve-gates-given": Parts(
        CHANNEL, _delta("delta/previous"), partial(inputs, gate="channel", extra=("beta",)), peers.KDA, _scalar
    ),
    "carve": Parts(
        CHANNEL,
        lambda call: spec_of("carve", content_chunk=call.content),
        lambda generator, *sizes, HV: carve_inputs(generator, *sizes),
        peers.KDA,
        without_content,
    ),
    "ccq": Parts("ccq/curvature", _delta("ccq"), partial(inputs, gate=None, extra=("eta",), values=False), peers.CURVATURE),
    "mamba3": Parts(
        "mamba3/siso",
        _delta("mamba3"),
        lambda generator, B, T, H, K, V, HV: mamba3_inputs(generator, B, T, HV, K, V, groups=H),
        peers.SIMPLE_GLA,
        with_heads,
    ),
    "lucid": Parts(
        "lucid/solve", _delta("lucid"), lambda generator, *sizes, HV: lucid_inputs(generator, *sizes), peers.SOLVE, unit_keys
    ),
    "lucid/attention": Parts(
        "lucid/solve",
        lambda call: lucid_attention(),
        lambda generator, *sizes, HV: lucid_inputs(generator, *sizes, queries=HV),
        peers.CUDNN,
        expanded,
    ),
    "polar": Parts(
        "polar/attention",
        _delta("polar"),
        lambda generator, *sizes, HV: polar_inputs(generator, *sizes, queries=HV),
        peers.CUDNN,
        expanded,
    ),
    "path": Parts(
        "path/engine",
        _delta("path"),
        lambda generator, *sizes, HV: path_inputs(generator, *sizes, queries=HV),
        peers.PATH,
        wide_transitions,
    ),
    "path/fox": Parts(
        "path/engine",
        _delta("path/fox"),
        lambda generator, *sizes, HV: forgetting_inputs(generator, *sizes, queries=HV),
        peers.PATH,
        wide_transitions,
    ),
    "path/lucid": Parts(
        "path/engine", _delta("path/lucid"), lambda generator, *sizes, HV: lucid_path_inputs(generator, *sizes)
    ),
}


def engine_of(call: Call, arch: tuple[int, int]) -> str:
    """The launch table that a call's kernels read on a GPU of this compute capability. An additive rule whose heads share keys has an engine
    of its own, where one of its configs fits."""
    facts = arch, call.dtype, call.K, call.V
    shared = call.rule == "additive" and call.H < call.HV and any(row.misfit(*facts) is None for row in rows(SHARED))
    return SHARED if shared else PARTS[call.rule].engine


@dataclass(frozen=True, kw_only=True)
class Drawn(Case):
    """A case of one call. Its inputs hold the initial state, whose gradients it takes too, by names that begin with START."""

    call: Call
    start: object = None

    @property
    def key(self) -> str:
        return self.call.name

    @property
    def shape(self) -> dict[str, int]:
        return self.call.shape

    def drawn(self, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """The call's tensors."""
        call = self.call
        x = super().tensors(device, getattr(torch, call.dtype), call.B, call.T, seed)
        return x | {name: y.to(device) for name, y in leaves(self.start, START) if y.is_floating_point()}


def case_of(call: Call, device: torch.device | str) -> Drawn:
    """The call on this device; its initial state is that after BEFORE tokens, float32."""
    parts = PARTS[call.rule]
    spec, dtype = parts.spec(call), getattr(torch, call.dtype)
    made = partial(parts.inputs, HV=call.HV)
    ends = call.packed()
    cu_seqlens = None if ends is None else torch.tensor(ends, device=device)
    settings: dict[str, Any] = {"op": call.rule, "at": "", "inputs": made, "call": call}
    start = None
    if call.state:
        before = Drawn(spec=spec, peer=None, **settings).tensors(device, dtype, len(call.sequences), BEFORE, seed=1)
        with torch.no_grad():
            start = whole(spec.chunk, impl="torch")({name: x.float() for name, x in before.items()})[-1]
    forms = {form: begun(getattr(spec, form), start, cu_seqlens) for form in ("chunk", "recurrent", "literal")}
    peer, peer_inputs = _peer(call, parts, cu_seqlens)
    return Drawn(spec=replace(spec, **forms), peer=peer, peer_inputs=peer_inputs, start=start, **settings)


def begun(form: Callable[..., tuple], start: object, cu_seqlens: Tensor | None) -> Callable[..., tuple]:
    """The form on the documents; its initial state is among its arguments, and what of it is no number is as it was."""

    def call(**x: Any) -> tuple:
        state = like(start, iter([x.pop(name, y) for name, y in leaves(start, START)]))
        return form(**x, initial_state=state, cu_seqlens=cu_seqlens)

    return call


def _peer(
    call: Call, parts: Parts, cu_seqlens: Tensor | None
) -> tuple[peers.Peer | None, Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    """The peer where it has the call, and what it is given. What it cannot do with these sizes it says itself."""
    peer, more = parts.peer, {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    if peer is peers.CURVATURE and (call.state or more):
        peer = None  # its mean is a running one over rows
    elif peer is peers.SOLVE and (call.K != call.V or operations(call) > SOLVED):
        peer = None
    elif peer is peers.CUDNN and more:
        peer, more = peers.DOCUMENTS, more | {"longest": max(call.documents)}
    if peer is None:
        return None, dict

    def given(x: dict[str, Tensor]) -> dict[str, Tensor]:
        theirs = parts.peer_inputs({name: y for name, y in x.items() if not name.startswith(START)})
        if peer not in READ_GROUPS:
            theirs = {name: _for_each(y, call) if name in ("q", "k", "b") else y for name, y in theirs.items()}
        states = [y for name, y in x.items() if name.startswith(START)]
        return theirs | ({START: states[0]} if states else {})

    load = peer.load
    return peer._replace(load=lambda: partial(load(), **more)), given


def _for_each(x: Tensor, call: Call) -> Tensor:
    """A head for every value head."""
    return x.repeat_interleave(call.HV // x.shape[2], 2) if x.dim() == 4 and x.shape[2] == call.H else x
