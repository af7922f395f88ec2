"""The papers' diagnostics of a trained model: every number comes from one forward pass over given tokens, whose probes are recorded.

A diagnosis takes a model and input_ids [B T] and returns plain numbers by layer, in the order of the layers that have the rule.
"""

from .carve import carve as carve
from .carve import chunkability as chunkability
from .ccq import ccq as ccq
from .ccq import rare as rare
from .listen import heard as heard
from .lucid import lucid as lucid
from .maps import maps as maps
from .memory import state_norms as state_norms
from .memory import state_peaks as state_peaks
from .overwrite import overwrite as overwrite
from .polar import polar as polar
from .qdelta import qdelta as qdelta
