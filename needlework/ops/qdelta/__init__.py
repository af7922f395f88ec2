"""Q-Delta: a delta rule that erases along the key plus λ times the query."""

from needlework.ops.qdelta.op import QDeltaOutput as QDeltaOutput
from needlework.ops.qdelta.op import chunk_qdelta as chunk_qdelta
from needlework.ops.qdelta.op import recurrent_qdelta as recurrent_qdelta
from needlework.ops.qdelta.op import step_qdelta as step_qdelta
