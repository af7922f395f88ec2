"""transformers' Mamba-2."""

from transformers import Mamba2Config

from needlework.fields import Positive

from .described import Described, filled
from .layout import Reading
from .mamba2_model import UNLIMITED, described_model


def mamba2(described: Described) -> Reading:
    described = filled(described, Mamba2Config)
    described.only(rms_norm=(True,), time_step_limit=UNLIMITED)
    # Its code gates before the norm whatever norm_before_gate says, which Codestral's file has as true; the others are of the start.
    described.ignore("norm_before_gate", "intermediate_size")
    described.ignore(*(f"time_step_{name}" for name in ("rank", "min", "max", "floor", "scale", "init_scheme")))
    reading = described_model(described, described.take("layer_norm_epsilon", Positive))
    described.finish()
    return reading
