import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def alone():
    """PyTorch warns a process that saves alone; checkpoint.py's own filter does not reach into pytest."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
