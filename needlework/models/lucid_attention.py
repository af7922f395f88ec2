"""LUCID in other people's models: `attn_implementation="lucid"` of transformers, registered when needlework.models is imported.

    Y = P⁻¹ V,   P_ij = e^{√d (k̂_i·k̂_j − 1)} where the mask shows j to i        O = softmax(scale · Q Kᵀ + mask) Y

An attention function gets keys and values as the cache already holds them, and not the cache. So the new rows are solved against
the earlier ones, which are solved already, and written back into the cache's own tensor: from then on it holds Y. Y depends on the
past alone, so beams, cropping and resuming work as with plain attention. P sees the same mask as the scores: pads, windows and
packed documents included.

Static caches are refused by the mask. Caches that copy values before attention (quantised, offloaded) would keep the unsolved V, and
nothing handed over shows it: from its first call on, a module that attends so looks at the cache itself (`_watch`), before it would
read unsolved rows.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from needlework.ops.lucid import LucidState, chunk_lucid

BLOCK = 64  # rows that are solved at once under a mask


def lucid_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    use_cache: bool | None = None,
    **_,
) -> tuple[Tensor, None]:
    """query [B Hq n d], key [B Hkv m d], value [B Hkv m V], n <= m, values of the first m − n rows solved -> o [B n Hq V], no weights.

    attention_mask: [B or 1, 1, n, m], True where a query sees a key, as `lucid_mask` makes it; None: all that is not later.
    use_cache False: value is nobody's cache, and is left as it is.
    Raises NotImplementedError for attention that is not causal, TypeError for a mask that is not boolean.
    """
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"attn_implementation='lucid': {type(module).__name__} is not causal, and the solve is")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise TypeError(f"attn_implementation='lucid': attention_mask is {attention_mask.dtype}, expected torch.bool")
    if not torch.compiler.is_compiling() and _watch not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_watch, with_kwargs=True)
    past = key.shape[2] - query.shape[2]
    if attention_mask is None:
        y = _solve(key, value, past)
    else:
        y = _solve_masked(key, value, past, attention_mask)
    solved = torch.cat([value[:, :, :past], y], 2)
    if use_cache is not False:
        with torch.no_grad():
            value.data[:, :, past:] = y
    causal = False
    if attention_mask is None:
        if not past:
            causal = True
        elif query.shape[2] > 1:
            attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(past)
    o = F.scaled_dot_product_attention(
        query, key, solved, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return o.transpose(1, 2).contiguous(), None


def _solve(key: Tensor, value: Tensor, past: int) -> Tensor:
    """The new rows of Y, where every row sees all before it."""
    # clones: what the op keeps for its backward may not change when the cache is written
    rows = lambda x: x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    k, v = rows(key[:, :, past:]), rows(value[:, :, past:])
    pages = None
    if past:
        length = torch.full((len(k),), past, device=k.device)
        pages = LucidState(rows(key[:, :, :past]), rows(value[:, :, :past]), length)
    return chunk_lucid(k, v, initial_state=pages).y.transpose(1, 2)


def _solve_masked(key: Tensor, value: Tensor, past: int, visible: Tensor) -> Tensor:
    """The same where a mask says which rows a row sees."""
    wide = torch.promote_types(key.dtype, torch.float32)
    unit, v = F.normalize(key.to(wide), dim=-1, eps=1e-6), value.to(wide)
    d, m = key.shape[-1], key.shape[2]
    y = v[:, :, :past]
    for i in range(past, m, BLOCK):
        j = min(i + BLOCK, m)
        P = torch.exp(math.sqrt(d) * (unit[:, :, i:j] @ unit[:, :, :j].mT - 1)) * visible[:, :, i - past : j - past, :j]
        within = P[..., i:].tril(-1) + torch.eye(j - i, dtype=wide, device=P.device)
        rest = v[:, :, i:j] - P[..., :i] @ y
        y = torch.cat([y, torch.linalg.solve_triangular(within, rest, upper=False, unitriangular=True)], 2)
    return y[:, :, past:].to(value.dtype)


def lucid_mask(*args, **kwargs) -> Tensor | None:
    """transformers' boolean mask; None where every row sees all before it and itself.

    Raises NotImplementedError where keys do not end at the last query, as in a static cache, and for masks that are not causal.
    """
    q_length, kv_length, q_offset, kv_offset = (kwargs.get(n, 0) for n in ("q_length", "kv_length", "q_offset", "kv_offset"))
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise NotImplementedError(
            f"attn_implementation='lucid' needs a cache whose keys end at the last query (DynamicCache): got {q_length} queries "
            f"from position {q_offset} and {kv_length} keys from {kv_offset}, as a static cache gives them"
        )
    if kwargs.get("allow_is_bidirectional_skip"):
        raise NotImplementedError("attn_implementation='lucid': the mask is not causal, and the solve is")
    window, padding = kwargs.get("local_size"), kwargs.get("attention_mask")
    plain = kwargs.pop("allow_is_causal_skip", True) and (window is None or kv_length <= window)
    if plain and (padding is None or (not torch.compiler.is_compiling() and bool(padding.all()))):
        return None
    return sdpa_mask(*args, **kwargs, allow_is_causal_skip=False)


def _watch(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """ValueError for a cache that does not hold the very tensor that attention gets: solved values would be lost in silence."""
    cache = next((x for x in (kwargs.get("past_key_values"), *args) if isinstance(x, Cache)), None)
    if cache is None or not cache.get_seq_length() or module.config._attn_implementation != "lucid":
        return
    layer = cache.layers[module.layer_idx]
    offloaded = getattr(cache, "offloading", False)
    if offloaded or not isinstance(layer, DynamicLayer) or hasattr(layer, "_quantize"):
        name = f"an offloaded {type(cache).__name__}" if offloaded else type(layer).__name__
        raise ValueError(
            f"attn_implementation='lucid' writes solved values into the cache, which {name} copies before that; use DynamicCache"
        )


def register() -> None:
    """Make transformers know "lucid"."""
    AttentionInterface.register("lucid", lucid_attention)
    AttentionMaskInterface.register("lucid", lucid_mask)
