"""LUCID in other people's models: `attn_implementation="lucid"` of transformers, registered when needlework.models is imported.

    Y = P⁻¹ V,   P_ij = e^{√d (k̂_i·k̂_j − 1)} where the mask shows j to i        O = softmax(scale · Q Kᵀ + mask) Y

An attention function gets keys and values as the cache already holds them, and not the cache. So the new rows are solved against
the earlier ones, which are solved already, and written back into the cache's own tensor: from then on it holds Y. Y depends on the
past alone, so beams, cropping and resuming work as with plain attention. P sees the same mask as the scores: pads, windows and
packed documents included; transformers shows documents by position_ids that restart, without a cache and an attention_mask.

Architectures, attention modules and keywords that lucid_architectures.py does not list are refused. Static caches are refused by
the mask. Caches that copy values before attention (quantised, offloaded) would keep the unsolved V, and nothing handed over shows it:
from its first call on, a module that attends so looks at the cache itself (`_watch`), before it would read unsolved rows.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from needlework.models.lucid_architectures import (
    NAME,
    check_architecture,
    check_keywords,
    check_module,
    config_of,
    refuse_others,
)
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
    **keywords: Any,
) -> tuple[Tensor, None]:
    """query [B Hq n d], key [B Hkv m d], value [B Hkv m V], n <= m, values of the first m − n rows solved -> o [B n Hq V], no weights.

    attention_mask: [B or 1, 1, n, m], True where a query sees a key, as `lucid_mask` makes it; None: all that is not later.
    value: its last n rows are overwritten with Y. A cache may hold them whatever use_cache says: OLMo-3 passes False with a cache.
    dropout: of the softmax' weights; the solve has none.
    Raises NotImplementedError for a module of an architecture that is not listed and for attention that is not causal, TypeError
    for an unknown keyword and a mask that is not boolean, ValueError for a mask of another shape, a window that no mask shows, and
    for output_attentions.
    """
    check_module(module)
    check_keywords(module, keywords)
    past = key.shape[2] - query.shape[2]
    if attention_mask is not None:
        _check_mask(attention_mask, query, key)
    elif keywords.get("sliding_window") is not None and key.shape[2] > keywords["sliding_window"]:
        raise ValueError(f"{NAME}: {key.shape[2]} keys, a window of {keywords['sliding_window']} and no mask that shows it")
    if not torch.compiler.is_compiling() and _watch not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_watch, with_kwargs=True)
    if attention_mask is None:
        y = _solve(key, value, past)
    else:
        y = _solve_masked(key, value, past, attention_mask)
    solved = torch.cat([value[:, :, :past], y], 2)
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


def _check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """A mask may come from the user, past `lucid_mask`: it has the one form, and shows nothing later."""
    (B, _, n, _), m = query.shape, key.shape[2]
    if mask.dtype != torch.bool:
        raise TypeError(f"{NAME}: attention_mask is {mask.dtype}, expected torch.bool")
    if mask.dim() != 4 or mask.shape[0] not in (1, B) or mask.shape[1:] != (1, n, m):
        raise ValueError(f"{NAME}: attention_mask has shape {tuple(mask.shape)}, expected ({B} or 1, 1, {n}, {m})")
    if n > 1:
        causal, reason = (
            ~mask.triu(m - n + 1).any(),
            f"{NAME}: attention_mask shows a query a later key, and the solve is causal",
        )
        if torch.compiler.is_compiling():
            torch._assert_async(causal, reason)
        elif not causal:
            raise NotImplementedError(reason)


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


def lucid_mask(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> Tensor | None:
    """transformers' boolean mask; None where every row sees all before it and itself.

    Raises NotImplementedError for architectures that are not listed, where keys do not end at the last query, as in a static
    cache, and for masks that are not causal.
    """
    check_architecture(config)
    q_length, kv_length, q_offset, kv_offset = (kwargs.get(n, 0) for n in ("q_length", "kv_length", "q_offset", "kv_offset"))
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise NotImplementedError(
            f"{NAME} needs a cache whose keys end at the last query (DynamicCache): got {q_length} queries "
            f"from position {q_offset} and {kv_length} keys from {kv_offset}, as a static cache gives them"
        )
    if kwargs.get("allow_is_bidirectional_skip"):
        raise NotImplementedError(f"{NAME}: the mask is not causal, and the solve is")
    window, padding = kwargs.get("local_size"), kwargs.get("attention_mask")
    plain = kwargs.pop("allow_is_causal_skip", True) and (window is None or kv_length <= window)
    if plain and (padding is None or (not torch.compiler.is_compiling() and bool(padding.all()))):
        return None
    return sdpa_mask(*args, **kwargs, allow_is_causal_skip=False)


def _watch(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """ValueError for a cache that does not hold the very tensor that attention gets: solved values would be lost in silence."""
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)  # GPT-NeoX calls it layer_past
    if cache is None or not cache.get_seq_length() or config_of(module)._attn_implementation != "lucid":
        return
    layer = cache.layers[module.layer_idx]  # pyrefly: ignore[bad-index] (an int, which torch types as a tensor or a module)
    offloaded = getattr(cache, "offloading", False)
    if offloaded or not isinstance(layer, DynamicLayer) or hasattr(layer, "_quantize"):
        name = f"an offloaded {type(cache).__name__}" if offloaded else type(layer).__name__
        raise ValueError(f"{NAME} writes solved values into the cache, which {name} copies before that; use DynamicCache")


def register() -> None:
    """Make transformers know "lucid", and refuse it where it is not made for the model."""
    refuse_others()
    AttentionInterface.register("lucid", lucid_attention)
    AttentionMaskInterface.register("lucid", lucid_mask)
