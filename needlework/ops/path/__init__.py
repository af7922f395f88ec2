"""PaTH attention: positions that the tokens make, as products of reflections between a key and its query."""

from needlework.ops.path.op import chunk_path as chunk_path
from needlework.ops.path.op import recurrent_path as recurrent_path
from needlework.ops.path.paged import paged_path as paged_path
from needlework.ops.path.state import BLOCK as BLOCK
from needlework.ops.path.state import PathOutput as PathOutput
from needlework.ops.path.state import PathState as PathState
from needlework.ops.path.step import step_path as step_path
