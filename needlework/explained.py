"""Python's errors that are the user's or the machine's. The command line shows one in a line; any other keeps its traceback.

They are here, apart from the library's own in `experiment/runner.py`, because those cost seconds of PyTorch and transformers.
"""

PYTHONS = ValueError, ArithmeticError, OSError, MemoryError
