"""How a measurement reads a trained model: logits without a cache, in training's precision, as many rows at once as fit."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from needlework.models import NeedleworkForCausalLM
from needlework.ops.attention.fused import fastest


def reader(model: NeedleworkForCausalLM) -> Callable[[Tensor], Tensor]:
    """input_ids [B T] -> logits, without a cache; on a GPU in bfloat16, as it was trained."""
    device = model.device

    def read(ids: Tensor) -> Tensor:
        with as_trained(device):
            return model(ids.to(device), use_cache=False).logits

    return read


def any_reader(model: Any, autocast: torch.dtype | None) -> Callable[[Tensor, int], Tensor]:
    """Of any causal model of transformers: input_ids [B T], keep -> the last `keep` logits, without a cache, products in `autocast`."""
    device = model.device
    chooses = "logits_to_keep" in inspect.signature(model.forward).parameters

    def read(ids: Tensor, keep: int) -> Tensor:
        with torch.inference_mode(), torch.autocast(device.type, autocast, enabled=autocast is not None), fastest():
            kept = {"logits_to_keep": keep} if chooses else {}
            return model(ids.to(device), use_cache=False, **kept).logits[:, -keep:]

    return read


@contextmanager
def as_trained(device: torch.device) -> Iterator[None]:
    """On a GPU bfloat16 autocast, and cuDNN's attention first where a layer leaves that to PyTorch: a measurement has few lengths."""
    if device.type != "cuda":
        yield
    else:
        with torch.autocast("cuda", torch.bfloat16), fastest():
            yield


def at_once(model: Any, T: int) -> int:
    """Rows of T tokens in a forward pass. On a GPU their logits (in the model's dtype, in float32 and in a softmax, 16 bytes in all) fill a
    sixteenth of its memory: several runs may share it, each with its training's memory. One long row alone would leave most of a GPU
    idle."""
    if model.device.type != "cuda":
        return max(1, 8_192 // T)
    memory = torch.cuda.get_device_properties(model.device).total_memory
    return max(1, memory // 256 // (model.config.vocab_size * T))


@contextmanager
def asking(model: nn.Module, ask: Callable[..., None]) -> Iterator[None]:
    """Calls `ask` before every module's forward: a whole pass over long rows takes too long to wait for."""
    hooks = [module.register_forward_pre_hook(ask) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
