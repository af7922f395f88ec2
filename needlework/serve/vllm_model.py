"""needlework's models as vLLM builds, loads and runs them. Only vLLM imports this file; `vllm.py` registers it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from needlework.layers.batch import Batch
from needlework.layers.state import size
from needlework.models.block import Residual
from needlework.models.modeling import NeedleworkForCausalLM
from needlework.serve.bins import Plan, Step, bin_of
from needlework.serve.vllm_layers import PageLayer, Slots


class Described(ModelArchConfigConvertorBase):
    """A config as vLLM plans its memory by: one head of keys and one of values, which together are the bytes of a page's token."""

    def __init__(self, hf_config: Any, *more: Any, **options: Any):
        super().__init__(hf_config, *more, **options)
        self.plan = Plan.of(hf_config, torch.float32)
        # vLLM takes a model for one with slots if a layer's type is not "full_attention", and ours with a memory or a convolution is.
        # The config's own setter refuses it.
        vars(hf_config)["layer_types"] = ["linear_attention" if held.fixed else "full_attention" for held in self.plan.held]

    def get_total_num_attention_heads(self) -> int:
        return 1

    def get_total_num_kv_heads(self) -> int:
        return 1

    def get_head_size(self) -> int:
        return max(1, self.plan.row_bytes // (2 * size(torch.float32)))


class NeedleworkVllm(nn.Module):
    """The model with its bins. vLLM reads what it can do from the flags."""

    has_inner_state = is_hybrid = supports_mamba_prefix_caching = True

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        model = vllm_config.model_config
        return ((Plan.of(model.hf_config, model.dtype).slot_bytes,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)  # a slot as it is

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[MambaAttentionBackendEnum]) -> dict[Any, tuple[Any, ...]]:
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        _check(vllm_config)
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        if vllm_config.cache_config.enable_prefix_caching and any(held.rewritten for held in Plan.of(config, dtype).held):
            raise ValueError(
                "enable_prefix_caching: got True, expected False for a model whose layers write their pages again (docs/serving.md says why)"
            )
        self.model = NeedleworkForCausalLM(config).to(dtype)
        self.plan = Plan.of(config, dtype)
        self.windows = {held.window for held in self.plan.held if held.rows}
        # vLLM orders caches by the number in their name
        named = lambda kind, i: f"{prefix}.{kind}.{i}".removeprefix(".")
        self.slot_names = [named("slots", i) for i in range(len(self.plan.slots))]
        self.page_names = [named("pages", len(self.slot_names) + i) for i in range(len(self.plan.pages))]
        self.slots = [Slots(name, self.plan.slot_bytes) for name in self.slot_names]
        self.pages = [PageLayer(name, self.plan.row_bytes, dtype) for name in self.page_names]
        self.tables: list[dict[str, Tensor]] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found = self.model.load_state_dict(dict(weights), strict=False)
        tied = self.model._tied_weights_keys if self.model.config.tie_word_embeddings else {}
        if wrong := [*found.unexpected_keys, *(set(found.missing_keys) - tied.keys())]:
            raise ValueError(
                f"weights: {', '.join(sorted(wrong))} are missing or unknown, expected those that save_pretrained writes"
            )
        self.model.tie_weights()
        return {name for name, _ in self.named_parameters()}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.model.embed(input_ids)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Normed hidden states [T D]."""
        steps = get_forward_context().attn_metadata
        if steps is None:  # vLLM measures what a step takes, or keeps an idle replica in step
            return self.model.model(input_ids[None]).last_hidden_state[0]
        by_layer: dict[str, Step] = steps
        T = next(iter(by_layer.values())).T
        given = Residual(self.embed_input_ids(input_ids[:T]))
        batches: dict[tuple[int, int], Batch] = {}
        for layer, (block, tables) in enumerate(zip(self.model.model.blocks, self._tables(), strict=True)):
            slots, pages = bin_of(layer, self.plan.slots), bin_of(layer, self.plan.pages)
            on_slots = None if slots is None else by_layer[self.slot_names[slots]]
            on_pages = None if pages is None else by_layer[self.page_names[pages]]
            step = on_slots or on_pages
            assert step is not None
            key = id(on_slots), id(on_pages)  # vLLM gives layers of a group one and the same
            if key not in batches:
                batches[key] = step.batch(positions[:T], on_pages, self.windows)
            given = block.serve(given, tables, batches[key])
        x = self.model.model.norm(*given)
        return torch.cat([x, x.new_zeros(len(input_ids) - T, x.shape[1])])

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.model.logits(hidden_states)

    def _tables(self) -> list[dict[str, Tensor]]:
        """Each layer's tables in vLLM's caches, which are bound once."""
        if not self.tables:
            page = self.pages[0].page if self.pages else 0
            self.tables = self.plan.tables([own.cache for own in self.slots], [own.cache for own in self.pages], page)
        return self.tables


def _check(vllm_config: VllmConfig) -> None:
    """ValueError for what these models are not served with, by the option's name."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for option, given, expected in (
        ("tensor_parallel_size", parallel.tensor_parallel_size, 1),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
        ("speculative_config", vllm_config.speculative_config, None),
        ("quantization", vllm_config.quant_config, None),
        ("lora_config", vllm_config.lora_config, None),
        ("kv_cache_dtype", cache.cache_dtype, "auto"),
    ):
        if given != expected:
            raise ValueError(f"{option}: got {given}, expected {expected} for a needlework model (docs/serving.md says why)")
