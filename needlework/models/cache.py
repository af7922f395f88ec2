"""The cache of `generate`: each layer's state as its mixer made it, fixed or growing."""

from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from needlework.layers.state import map_state
from needlework.models.config import NeedleworkConfig


class StateLayer(CacheLayerMixin):
    """One layer's state and the number of positions seen, pads included."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.state: object = None
        self.seen = 0

    def put(self, state: object, tokens: int) -> None:
        self.state, self.seen, self.is_initialized = state, self.seen + tokens, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the mixer makes its state."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a needlework layer hands its state over whole (`put`); it has no key and value to append")

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = map_state(self.state, lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = map_state(self.state, lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = map_state(self.state, lambda x: x[indices])

    def activate_past_recording(self) -> None:
        raise ValueError("assisted decoding rolls tokens back, and a recurrent state cannot be rolled back")

    def crop(self, max_length: int) -> None:
        if max_length:
            raise ValueError(f"crop({max_length}): a recurrent state cannot be rolled back")

    def offload(self) -> None:
        raise ValueError("cache_implementation='offloaded': needlework's states stay on the model's device")

    prefetch = offload


class NeedleworkCache(Cache):
    """transformers' cache of a needlework model: a StateLayer for every layer.

    Beams may be reordered and rows selected. Tokens cannot be taken back: `crop` raises ValueError.

    >>> import torch
    >>> from needlework.layers import QDelta, Recurrent
    >>> from needlework.models import NeedleworkCache, NeedleworkConfig, NeedleworkForCausalLM
    >>> mixers = {"Q": Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta())}
    >>> config = NeedleworkConfig(vocab_size=257, hidden_size=64, layout="QQ", mixers=mixers)
    >>> cache = NeedleworkCache(config)
    >>> _ = NeedleworkForCausalLM(config)(torch.randint(257, (2, 100)), past_key_values=cache)
    >>> cache.get_seq_length()
    100
    """

    layers: list[StateLayer]  # pyrefly: ignore[bad-override-mutable-attribute] (none of transformers' layers is put in)

    def __init__(self, config: NeedleworkConfig):
        super().__init__(layers=[StateLayer() for _ in config.layout])
