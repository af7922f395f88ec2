"""PaTH attention: positions that the tokens make, as products of reflections between a key and its query; with a forget gate PaTH-FoX."""

from needlework.ops.path.op import chunk_path as chunk_path
from needlework.ops.path.op import recurrent_path as recurrent_path
from needlework.ops.path.paged import paged_path as paged_path
from needlework.ops.path.solve.op import chunk_lucid_path as chunk_lucid_path
from needlework.ops.path.solve.op import recurrent_lucid_path as recurrent_lucid_path
from needlework.ops.path.solve.op import step_lucid_path as step_lucid_path
from needlework.ops.path.solve.paged import paged_lucid_path as paged_lucid_path
from needlework.ops.path.solve.paged import solve_path_pages as solve_path_pages
from needlework.ops.path.solve.state import LucidPathOutput as LucidPathOutput
from needlework.ops.path.solve.state import LucidPathState as LucidPathState
from needlework.ops.path.state import BLOCK as BLOCK
from needlework.ops.path.state import PathOutput as PathOutput
from needlework.ops.path.state import PathState as PathState
from needlework.ops.path.step import step_path as step_path
