"""Polar attention (ATMA): a softmax with a null sink that returns a direction and a magnitude."""

from .op import chunk_polar as chunk_polar
from .op import step_polar as step_polar
from .reference import recurrent_polar as recurrent_polar
from .state import PolarOutput as PolarOutput
from .state import PolarState as PolarState
