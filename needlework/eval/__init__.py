"""Measurement: retrieval, loss and speed of any model that maps token ids to logits.

Nothing here builds a model or an episode; both come in as arguments.
"""

from .loss import Loss as Loss
from .loss import loss as loss
from .retrieval import Retrieval as Retrieval
from .retrieval import retrieval as retrieval
from .throughput import throughput as throughput
