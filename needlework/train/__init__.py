"""Training: one model, batches that are a function of the step, a directory. A stopped run resumes.

On one CPU thread or on the GPUs of several hosts, by PyTorch's own engine. Knows no mixer: a model is whatever `losses` can call.
"""

from .checkpoint import CheckpointError as CheckpointError
from .checkpoint import begun as begun
from .checkpoint import contents as contents
from .checkpoint import latest as latest
from .checkpoint import load as load
from .config import TrainConfig as TrainConfig
from .guard import BadStep as BadStep
from .guard import GrowingState as GrowingState
from .guard import Guard as Guard
from .guard import NonFiniteLoss as NonFiniteLoss
from .guard import Spike as Spike
from .launch import relaunch as relaunch
from .lock import InUse as InUse
from .lock import alone as alone
from .log import logged as logged
from .log import summary_writer as summary_writer
from .loop import Progress as Progress
from .loop import Result as Result
from .loop import train as train
from .losses import Batch as Batch
from .losses import Losses as Losses
from .losses import Piece as Piece
from .losses import losses_of as losses_of
from .metadata import commit as commit
from .metadata import versions as versions
from .optim import AdamW as AdamW
from .optim import Muon as Muon
from .schedule import Cooldown as Cooldown
from .schedule import Cosine as Cosine
from .shard import full_state as full_state
from .world import Parallel as Parallel
from .world import World as World
from .world import leave as leave
