"""Custom ops under autocast: what runs inside stays in the precision that the op's contract states."""

import torch
from torch._ops import OpOverload

DEVICES = ("cpu", "cuda")


def keep_precision(*ops: OpOverload) -> None:
    """Shield custom ops from the caller's autocast, which would run their matrix products in half; float64 passes as it is."""
    for op in ops:
        for device in DEVICES:
            torch.library.register_autocast(op, device, torch.float32)
