"""attn_implementation="lucid" on other people's Llama and Qwen3: with a cache, padded, packed, in beams, compiled: one and the same Y."""

import copy
import math

import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, DynamicCache, GPTNeoXConfig, LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache, DynamicLayer

import needlework.models  # noqa: F401 (registers "lucid")
from needlework.models.lucid_attention import lucid_attention
from needlework.testing.rows import chosen

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen": Qwen3Config(**SIZES),
    "window": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "neox": GPTNeoXConfig(**SIZES),
}
PROMPT = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(0))


def build(name: str, attention: str = "lucid"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=attention).eval().double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)  # so that keys and values matter
    return model


@pytest.fixture(params=["llama", "qwen", "window"])
def model(request):
    return build(request.param)


def logits(model, ids, mask=None) -> torch.Tensor:
    """Of every token, without a cache."""
    position = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=position, use_cache=False).logits


def greedy(model, ids, new: int, mask=None) -> torch.Tensor:
    for _ in range(new):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        ids = torch.cat([ids, logits(model, ids, mask)[:, -1:].argmax(-1)], 1)
    return ids


def generate(model, ids=PROMPT, new: int = 12, **settings) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new, do_sample=False, **settings)


def definition(q, k, v, visible) -> torch.Tensor:
    """O = softmax(Q Kᵀ/√d) Y with P Y = V, all of it in memory."""
    d, T = k.shape[-1], k.shape[2]
    unit = normalize(k, dim=-1)
    P = torch.exp(math.sqrt(d) * (unit @ unit.mT - 1)) * visible
    y = torch.linalg.solve(P.tril(-1) + torch.eye(T, dtype=k.dtype), v)
    group = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(group, 1).mT / math.sqrt(d)).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ y.repeat_interleave(group, 1)).transpose(1, 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T", [5, 130])
def test_it_is_the_definition_and_so_are_its_gradients(masked, T):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, H, T, 16, dtype=torch.float64, generator=g).requires_grad_() for H in (4, 2, 2))
    visible = torch.ones(2, 1, T, T, dtype=torch.bool).tril()
    if masked:
        visible[1, :, T // 2 :, : T // 2] = False  # two documents
    o, _ = lucid_attention(build("llama").model.layers[0].self_attn, q, k, v.clone(), visible if masked else None)
    want = definition(q, k, v, visible)
    do = torch.randn(o.shape, dtype=torch.float64, generator=g)
    assert (o - want).abs().max() <= 1e-12
    for a, b in zip(torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do), strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


def test_dropout_falls_on_the_weights_of_the_softmax():
    q, k, v = torch.randn(3, 64, 1, 1, 16, dtype=torch.float64)
    o, _ = lucid_attention(build("llama").model.layers[0].self_attn, q, k, v, None, dropout=0.5)
    kept = (o[:, 0] == 2 * v[:, 0]).all(-1)
    assert 0 < kept.sum() < 64 and (o[~kept] == 0).all()


def test_generating_is_the_full_forward_token_by_token(model):
    out = generate(model, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, greedy(model, PROMPT, 12))
    full = logits(model, out.sequences)[:, 10:-1]
    # transformers hands out logits in float32
    assert (torch.stack(out.logits, 1) - full).abs().max() <= torch.finfo(torch.float32).eps * full.abs().max()


def test_a_model_attends_otherwise_than_softmax():
    assert (logits(build("llama"), PROMPT) - logits(build("llama", "sdpa"), PROMPT)).abs().max() > 1e-2


def test_a_left_padded_row_is_the_row_alone(model):
    mask = torch.ones_like(PROMPT)
    mask[0, :4] = 0
    padded = generate(model, PROMPT * mask, attention_mask=mask)
    assert torch.equal(padded, greedy(model, PROMPT * mask, 12, mask))
    assert torch.equal(padded[0, 4:], generate(model, PROMPT[:1, 4:])[0])


def test_beams_are_the_same_with_a_cache_and_without(model):
    assert torch.equal(*(generate(model, new=8, num_beams=3, use_cache=use_cache) for use_cache in (True, False)))


def test_a_cache_may_be_cropped():
    model = build("llama")
    assert torch.equal(generate(model, PROMPT[:1], prompt_lookup_num_tokens=3), generate(model, PROMPT[:1]))


def test_packed_documents_do_not_see_each_other():
    model = build("llama")
    position = torch.cat([torch.arange(7), torch.arange(4)])[None]
    with torch.no_grad():
        packed = model(PROMPT[:1], position_ids=position, use_cache=False).logits
    alone = torch.cat([logits(model, PROMPT[:1, :7]), logits(model, PROMPT[:1, 7:])], 1)
    assert (packed - alone).abs().max() <= 1e-10


def test_gradients_with_a_cache_and_with_checkpointing_are_those_without(model):
    def gradients(call) -> list:
        model.zero_grad()
        call().backward()
        return [p.grad.clone() for p in model.parameters()]

    def continued():
        cache = model(PROMPT[:, :5], use_cache=True, past_key_values=DynamicCache(config=model.config)).past_key_values
        return model(PROMPT[:, 5:], past_key_values=cache).logits.square().sum()

    # a cache passes the gradient of the second part to the first one's keys and solved values, too
    whole = gradients(lambda: model(PROMPT, use_cache=False).logits[:, 5:].square().sum())
    near = lambda found: all((a - b).norm() <= 1e-9 * b.norm() + 1e-12 for a, b in zip(found, whole, strict=True))
    assert (continued() - model(PROMPT, use_cache=False).logits[:, 5:].square().sum()).abs() <= 1e-6
    assert near(gradients(lambda: model(PROMPT).logits[:, 5:].square().sum()))
    model.train()
    model.gradient_checkpointing_enable()
    assert near(gradients(lambda: model(PROMPT).logits[:, 5:].square().sum()))


@pytest.mark.parametrize("cached, padded", chosen([(False, False), (True, True)], quick=[(True, True)]))
def test_it_compiles_without_a_graph_break(cached, padded):
    model = build("llama")
    model.model.layers = model.model.layers[:1]
    call = lambda ids, mask, cache: model(ids, attention_mask=mask, past_key_values=cache, use_cache=cached).logits
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    one, two = (DynamicCache(config=model.config) if cached else None for _ in range(2))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        for ids, seen in ((PROMPT, 11), (PROMPT[:, :1], 12)):
            shown = mask[:, :seen] if padded else None
            assert (compiled(ids, shown, one) - call(ids, shown, two)).abs().max() <= 1e-10


def test_a_static_cache_is_refused_with_the_reason():
    with pytest.raises(NotImplementedError, match="keys end at the last query"):
        generate(build("llama"), cache_implementation="static", disable_compile=True)


class Rounded(DynamicLayer):
    """Quantised in name: what it keeps is a copy."""

    def _quantize(self, x):
        return x.clone()

    def update(self, *args, **kwargs):
        return tuple(map(self._quantize, super().update(*args, **kwargs)))


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_a_cache_that_keeps_copies_is_refused_before_it_is_read(name):
    model = build(name)
    with pytest.raises(ValueError, match="Rounded copies"):
        generate(model, past_key_values=Cache(layers=[Rounded() for _ in range(3)]))


def test_a_cache_holds_solved_values_whatever_use_cache_says():
    model = build("llama")
    cache = DynamicCache(config=model.config)
    parts = [model(PROMPT[:, part], past_key_values=cache, use_cache=False).logits for part in (slice(0, 6), slice(6, 11))]
    assert (torch.cat(parts, 1) - logits(model, PROMPT)).abs().max() <= 1e-10


def test_the_name_is_enough_for_from_pretrained(tmp_path):
    model = build("llama", "sdpa")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="lucid")
    assert again.config._attn_implementation == "lucid"
    assert torch.equal(generate(again.double()), generate(build("llama")))
