"""Bins of slots and of pages, which vLLM takes for layers with a cache: how large they are, and what each step says of them."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from needlework.layers.batch import Pages
from needlework.layers.state import size
from needlework.serve.bins import Step


class SlotSteps(AttentionMetadataBuilder[Step]):
    reorder_batch_threshold = 1  # sequences with one new token come first

    def __init__(self, *given: Any):
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Step:
        metadata, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        block = mamba_get_block_table_tensor(metadata.block_table_tensor, metadata.seq_lens, self.kv_cache_spec, mode)
        return _step(metadata, slots=block[:, 0].long())


class PageSteps(AttentionMetadataBuilder[Step]):
    reorder_batch_threshold = 1

    def __init__(self, *given: Any):
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Step:
        metadata = common_attn_metadata
        return _step(
            metadata, pages=Pages(metadata.block_table_tensor, metadata.slot_mapping[: metadata.num_actual_tokens].long())
        )


def _step(metadata: CommonAttentionMetadata, slots: Tensor | None = None, pages: Pages | None = None) -> Step:
    on_host = metadata.query_start_loc_cpu, metadata.seq_lens_cpu_upper_bound  # exact, for there is no speculation
    return Step.of(metadata.query_start_loc, metadata.seq_lens, on_host, metadata.num_actual_tokens, slots, pages)


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
