"""CCQ, the curvature-conditioned query: a transform of the query before any linear-attention read."""

from .op import chunk_ccq as chunk_ccq
from .op import step_ccq as step_ccq
from .reference import recurrent_ccq as recurrent_ccq
from .state import CcqOutput as CcqOutput
from .state import CurvatureState as CurvatureState
from .state import empty_state as empty_state
