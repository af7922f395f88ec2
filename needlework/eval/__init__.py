"""Measurement: retrieval, loss and speed of any model that maps token ids to logits, and the report of a comparison.

Nothing here builds a model or an episode; both come in as arguments. Only the plotting files need matplotlib.
"""

from .figures import picture as picture
from .loss import Loss as Loss
from .loss import loss as loss
from .report import write_report as write_report
from .results import Results as Results
from .results import load_results as load_results
from .results import save_results as save_results
from .retrieval import Retrieval as Retrieval
from .retrieval import retrieval as retrieval
from .throughput import throughput as throughput
