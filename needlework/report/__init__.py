"""Pages, tables and figures, made of results.json and logs alone. Only the plotting files need matplotlib."""

from .figures import picture as picture
from .page import write_report as write_report
from .results import Results as Results
from .results import load_results as load_results
from .results import save_results as save_results
