"""How a measurement reads a trained model: logits without a cache, in training's precision, as many rows at once as fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from needlework.models import NeedleworkForCausalLM
from needlework.ops.common.attention import fastest


def reader(model: NeedleworkForCausalLM) -> Callable[[Tensor], Tensor]:
    """input_ids [B T] -> logits, without a cache; on a GPU in bfloat16, as it was trained."""
    device = model.device

    def read(ids: Tensor) -> Tensor:
        with as_trained(device):
            return model(ids.to(device), use_cache=False).logits

    return read


@contextmanager
def as_trained(device: torch.device) -> Iterator[None]:
    """On a GPU in bfloat16, attention by the kernels of training: lengths are few here too."""
    if device.type != "cuda":
        yield
    else:
        with torch.autocast("cuda", torch.bfloat16), fastest():
            yield


def at_once(model: NeedleworkForCausalLM, T: int) -> int:
    """Rows of T tokens in a forward pass: those whose logits a quarter of the GPU holds, each as the model gives it, in float32 and in
    a softmax, and 32 bits count. A long row alone leaves most of a GPU idle where its chunks wait for one another."""
    if model.device.type != "cuda":
        return max(1, 8_192 // T)
    memory = torch.cuda.get_device_properties(model.device).total_memory
    return max(1, min(memory // 64, 2**31 - 1) // (model.config.vocab_size * T))


@contextmanager
def asking(model: nn.Module, ask: Callable[..., None]) -> Iterator[None]:
    """`ask` is called before every module's forward: a pass over long rows takes too long to wait for."""
    hooks = [module.register_forward_pre_hook(ask) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
