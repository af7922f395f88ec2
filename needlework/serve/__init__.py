"""Serving: many requests at once on slots and pages. A layer owns no state here; `Tables` does, as the scheduler's steps say."""

from .request import Event as Event
from .request import Request as Request
from .request import Sampling as Sampling
from .scheduler import Scheduler as Scheduler
from .scheduler import SchedulerConfig as SchedulerConfig
from .step import Step as Step
