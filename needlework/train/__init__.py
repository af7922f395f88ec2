"""Training: one model, batches that are a function of the step, a directory; stopped and resumed without a trace.

Knows no mixer: a model is whatever maps `input_ids` to logits.
"""

from .checkpoint import CheckpointError as CheckpointError
from .checkpoint import latest as latest
from .checkpoint import load as load
from .config import TrainConfig as TrainConfig
from .loop import NonFiniteLoss as NonFiniteLoss
from .loop import Progress as Progress
from .loop import Result as Result
from .loop import train as train
from .optim import AdamW as AdamW
from .optim import Muon as Muon
from .schedule import Cooldown as Cooldown
from .schedule import Cosine as Cosine
