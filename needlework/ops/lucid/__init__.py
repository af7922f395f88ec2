"""LUCID: values solved against the overlap of their keys, for a softmax attention to read."""

from needlework.ops.lucid.op import chunk_lucid as chunk_lucid
from needlework.ops.lucid.op import recurrent_lucid as recurrent_lucid
from needlework.ops.lucid.op import step_lucid as step_lucid
from needlework.ops.lucid.paged import paged_lucid as paged_lucid
from needlework.ops.lucid.paged import solve_pages as solve_pages
from needlework.ops.lucid.state import LucidOutput as LucidOutput
from needlework.ops.lucid.state import LucidState as LucidState
