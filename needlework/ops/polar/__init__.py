"""Polar attention (ATMA): a softmax with a null sink that returns a direction and a magnitude."""

from needlework.ops.polar.op import chunk_polar as chunk_polar
from needlework.ops.polar.op import step_polar as step_polar
from needlework.ops.polar.reference import recurrent_polar as recurrent_polar
from needlework.ops.polar.state import PolarOutput as PolarOutput
from needlework.ops.polar.state import PolarState as PolarState
