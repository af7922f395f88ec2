"""What both models share with transformers: names, how weights start, and how they are loaded."""

from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from needlework.layers.projection import OutProjection, Projection
from needlework.models.auto import Installed
from needlework.models.config import NeedleworkConfig


class NeedleworkPreTrainedModel(Installed, PreTrainedModel):
    """What both models share with transformers: names, initialisation, loading."""

    config: NeedleworkConfig  # pyrefly: ignore[bad-override-mutable-attribute] (as every model of transformers does)
    config_class = NeedleworkConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers takes no tuple)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # generate() then refuses assisted decoding and prompt lookup itself

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """PyTorch's convention: a module with tensors of its own starts in reset_parameters, then the config's choices."""
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        loaded = {name: p.clone() for name, p in own.items() if getattr(p, "_is_hf_initialized", False)}
        if not own or len(loaded) == len(own):
            return
        module.reset_parameters()  # pyrefly: ignore[not-callable] (torch types every attribute as a tensor or a module)
        std = self.config.initializer_range
        if type(module) in (nn.Linear, nn.Embedding, OutProjection, Projection) and std is not None:
            nn.init.normal_(own["weight"], std=std)
            if "bias" in own:
                nn.init.zeros_(own["bias"])
        if self.config.zero_output and (isinstance(module, OutProjection) or module is self.get_output_embeddings()):
            for tensor in own.values():
                nn.init.zeros_(tensor)
        if self.config.scaled_output and isinstance(module, OutProjection):
            own["weight"].div_(len(self.config.layout) ** 0.5)
        for name, value in loaded.items():  # from_pretrained has filled these already
            own[name].copy_(value)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """As everywhere in transformers, a pair with `output_loading_info`; ValueError for a `device_map` that does not keep every weight
        on a device."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if getattr(model, "hf_device_map", None) and any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                f"device_map: {model.hf_device_map} offloads weights, which are brought back for a module's forward; a needlework "
                "layer reads several modules' weights at once. Expected devices that hold the whole model"
            )
        return loaded

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() makes no DynamicCache: forward makes a NeedleworkCache
