"""The Q-Delta authors' layout, on flash-linear-attention's models. Their kernels compute the coupling "transposed" (`ops/qdelta`)."""

from needlework.layers import QDelta

from .described import Described
from .gated_deltanet import gated_delta
from .layout import Reading

LAM = {"write.lam.project.weight": "lamb_proj.weight"}


def qdelta(described: Described) -> Reading:
    described.only(lamb_bias=(0.9,))  # λ = σ(W x − 0.9): the constant of the layer
    doubled = described.take("allow_neg_eigval", bool, False)
    return gated_delta(described, QDelta(coupling="transposed", allow_neg_eigval=doubled), LAM)
