"""The delta family: linear attention, GLA, DeltaNet, Gated DeltaNet, KDA and GDN-2 are one recurrence."""

from needlework.ops.delta.op import chunk_delta as chunk_delta
from needlework.ops.delta.op import step_delta as step_delta
from needlework.ops.delta.recurrent import DeltaOutput as DeltaOutput
from needlework.ops.delta.recurrent import recurrent_delta as recurrent_delta
