"""CARVE: a delta rule whose erase gate reads the mean of the memory's own recent outputs."""

from .op import chunk_carve as chunk_carve
from .op import recurrent_carve as recurrent_carve
from .op import step_carve as step_carve
from .state import CarveOutput as CarveOutput
from .state import CarveState as CarveState
from .state import empty_state as empty_state
