"""flash-linear-attention's Mamba-2, whose model_type is transformers' too."""

from needlework.fields import Positive

from .described import Described
from .layout import Reading
from .mamba2_model import UNLIMITED, described_model


def mamba2_fla(described: Described) -> Reading:
    described.only(rmsnorm=(True,), norm_before_gate=(False,), D_has_hdim=(False,), dt_limit=UNLIMITED)
    # kernels that compute the same, and what only training does
    described.ignore("fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
    described.ignore("conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor")
    return described_model(described, described.take("norm_eps", Positive, 1e-5))
