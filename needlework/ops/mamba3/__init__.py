"""Mamba-3: an additive memory whose keys and queries turn with the tokens, written by the trapezoidal rule."""

from needlework.ops.mamba3.op import chunk_mamba3 as chunk_mamba3
from needlework.ops.mamba3.op import recurrent_mamba3 as recurrent_mamba3
from needlework.ops.mamba3.op import step_mamba3 as step_mamba3
from needlework.ops.mamba3.state import Mamba3Output as Mamba3Output
from needlework.ops.mamba3.state import Mamba3State as Mamba3State
from needlework.ops.mamba3.state import empty_state as empty_state
