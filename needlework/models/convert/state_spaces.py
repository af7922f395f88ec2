"""The Mamba-2 authors' own layout, whose config.json has no model_type; `ssm_cfg` names the layer and holds its options."""

from needlework.fields import AtLeastTwo, Count

from .described import Described
from .layout import Reading
from .mamba2_model import UNLIMITED, layer, model

EPS = 1e-5  # of every norm: no key of theirs says it


def state_spaces(described: Described) -> Reading:
    described.only(rms_norm=(True,), d_intermediate=(0,), attn_layer_idx=([],))
    described.ignore("attn_cfg", "residual_in_fp32", "fused_add_norm")
    dim = described.take("d_model", Count)
    ssm = Described(described.take("ssm_cfg", dict), f"{described.where}: ssm_cfg")
    ssm.take("layer", str)  # without it their layer is the first Mamba
    inner, head_dim = ssm.take("expand", Count, 2) * dim, ssm.take("headdim", Count, 64)
    ssm.only(
        layer=("Mamba2",), d_ssm=(None, inner), rmsnorm=(True,), norm_before_gate=(False,), bias=(False,), D_has_hdim=(False,),
        dt_limit=UNLIMITED,
    )  # fmt: skip
    ssm.ignore("chunk_size", "use_mem_eff_path", "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor")
    mixer = layer(
        ssm, ("ngroups", ssm.take("ngroups", Count, 1)), heads=inner // head_dim, key_dim=ssm.take("d_state", Count, 128),
        value_dim=head_dim, taps=ssm.take("d_conv", AtLeastTwo, 4), bias=ssm.take("conv_bias", bool, True), eps=EPS,
    )  # fmt: skip
    ssm.finish()
    multiple = described.take("pad_vocab_size_multiple", Count, 8)
    return model(
        described, mixer, layers=described.take("n_layer", Count), dim=dim, eps=EPS, embedding="embedding",
        vocabulary=-(-described.take("vocab_size", Count) // multiple) * multiple, tied=described.take("tie_embeddings", bool, True),
    )  # fmt: skip
