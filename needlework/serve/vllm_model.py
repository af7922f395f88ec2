"""needlework's models as vLLM builds, loads and runs them. Only vLLM imports this file; `vllm.py` tells it to."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from needlework.layers.batch import Batch, Pages
from needlework.layers.state import size
from needlework.models.block import Residual
from needlework.models.modeling import NeedleworkForCausalLM
from needlework.serve.bins import Plan, Step, bin_of


class Described(ModelArchConfigConvertorBase):
    """A config as vLLM plans its memory by: one head of keys and one of values, which together are the bytes of a page's token."""

    def __init__(self, hf_config: Any, *more: Any, **options: Any):
        super().__init__(hf_config, *more, **options)
        self.plan = Plan.of(hf_config, torch.float32)
        # vLLM takes a model for one with slots if a layer's type is not "full_attention", and ours with a memory or a convolution is.
        # The config itself lets nobody change it.
        vars(hf_config)["layer_types"] = ["linear_attention" if held.fixed else "full_attention" for held in self.plan.held]

    def get_total_num_attention_heads(self) -> int:
        return 1

    def get_total_num_kv_heads(self) -> int:
        return 1

    def get_head_size(self) -> int:
        return max(1, self.plan.row_bytes // (2 * size(torch.float32)))


class SlotSteps(AttentionMetadataBuilder[Step]):
    reorder_batch_threshold = 1  # sequences with one new token come first

    def __init__(self, *given: Any):
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Step:
        told, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        block = mamba_get_block_table_tensor(told.block_table_tensor, told.seq_lens, self.kv_cache_spec, mode)
        return _step(told, slots=block[:, 0].long())


class PageSteps(AttentionMetadataBuilder[Step]):
    reorder_batch_threshold = 1

    def __init__(self, *given: Any):
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Step:
        told = common_attn_metadata
        return _step(told, pages=Pages(told.block_table_tensor, told.slot_mapping[: told.num_actual_tokens].long()))


def _step(told: CommonAttentionMetadata, slots: Tensor | None = None, pages: Pages | None = None) -> Step:
    on_host = told.query_start_loc_cpu, told.seq_lens_cpu_upper_bound  # exact, for there is no speculation
    return Step.of(told.query_start_loc, told.seq_lens, on_host, told.num_actual_tokens, slots, pages)


class SlotBackend(AttentionBackend):
    """No attention of vLLM's: it says how metadata are made."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "NEEDLEWORK_SLOTS"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[SlotSteps]:
        return SlotSteps

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class PageBackend(AttentionBackend):
    """The same for pages, of which the ops take any multiple of 16 rows."""

    supported_dtypes: ClassVar[list[torch.dtype]] = SlotBackend.supported_dtypes

    @staticmethod
    def get_name() -> str:
        return "NEEDLEWORK_PAGES"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[PageSteps]:
        return PageSteps

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


class Slots(MambaBase):
    """A bin of slots, which vLLM takes for a layer: one tensor of bytes, so that it copies, pads and counts one kind of state."""

    def __init__(self, name: str, size: int):
        self.size, self.kv_cache = size, (torch.empty(0),)
        get_current_vllm_config().compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[AttentionBackend]:
        return SlotBackend

    @property
    def cache(self) -> Tensor:
        """[slots size] uint8."""
        return self.kv_cache[0]


class PageManager(FullAttentionManager):
    """vLLM lets a sequence share pages of a prompt that the same step computes, for attention writes every row before it reads one.
    LUCID's solve reads rows while others are written: a sequence waits here for the next step, as vLLM has those with slots wait."""

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self.of_this_step: set[Any] = set()

    def new_step_starts(self) -> None:
        self.of_this_step.clear()

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], *more: Any, **options: Any
    ) -> int:
        if any(block.block_hash in self.of_this_step for block in new_computed_blocks):
            return self.block_pool.num_gpu_blocks + 1  # more than there are: not in this step
        return super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *more, **options)

    def cache_blocks(self, request: Any, *more: Any, **options: Any) -> None:
        counted = lambda: self.num_cached_block.get(request.request_id, 0)
        before = counted()
        super().cache_blocks(request, *more, **options)
        blocks = self.req_to_blocks[request.request_id]
        self.of_this_step.update(block.block_hash for block in blocks[before : counted()] if block.block_hash is not None)


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM's own come first: it registers them only into an empty registry


@register_kv_cache_spec(manager_class=PageManager, uniform_type_base_spec=FullAttentionSpec)
class PageSpec(FullAttentionSpec):
    """Pages whose sequences are counted by PageManager."""


class PageLayer(AttentionLayerBase):
    """A bin of pages, which vLLM takes for a layer with one head."""

    def __init__(self, name: str, size: int, dtype: torch.dtype):
        self.size, self.dtype, self.kv_cache = size, dtype, torch.empty(0)
        get_current_vllm_config().compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PageBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> PageSpec:
        numbers = self.size // size(self.dtype)
        page = vllm_config.cache_config.block_size
        return PageSpec(block_size=page, num_kv_heads=1, head_size=numbers // 2, dtype=self.dtype)

    @property
    def page(self) -> int:
        """Rows of one: the cache is [pages 1 rows numbers]."""
        return self.kv_cache.shape[2]

    @property
    def cache(self) -> Tensor:
        """[pages rows · size] uint8."""
        return self.kv_cache.view(len(self.kv_cache), -1).view(torch.uint8)


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
        told: dict[str, Step] = steps
        T = next(iter(told.values())).T
        given = Residual(self.embed_input_ids(input_ids[:T]))
        batches: dict[tuple[int, int], Batch] = {}
        for layer, (block, tables) in enumerate(zip(self.model.model.blocks, self._tables(), strict=True)):
            slots, pages = bin_of(layer, self.plan.slots), bin_of(layer, self.plan.pages)
            on_slots = None if slots is None else told[self.slot_names[slots]]
            on_pages = None if pages is None else told[self.page_names[pages]]
            step = on_slots or on_pages
            assert step is not None
            key = id(on_slots), id(on_pages)  # vLLM gives layers of a group one and the same
            if key not in batches:
                batches[key] = step.batch(positions[:T], on_pages, self.windows)
            given = block.serve(given, tables, batches[key])
        x = self.model.model.norm(given.whole())
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
