"""Every architecture that attn_implementation="lucid" serves is the definition, causal, cached, padded and packed; every other is
refused."""

import functools

import pytest
import torch
from torch.nn.functional import normalize
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    Gemma3Config,
    LlavaConfig,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from needlework.models.lucid_architectures import ARCHITECTURES, HARMLESS, check_module
from needlework.models.lucid_attention import lucid_attention

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
WINDOW = dict(sliding_window=4)
MIXED = dict(**WINDOW, layer_types=["sliding_attention", "full_attention"])
# every expert gets every token, so that a later token does not change the shapes that a product rounds by
EXPERTS = dict(num_experts_per_tok=2, experts_implementation="eager")
OWN = {
    "cohere2": dict(**MIXED, head_dim=8),
    "cohere": dict(use_qk_norm=True),
    "gemma": dict(head_dim=16),
    "gemma3_text": dict(**MIXED, head_dim=16, query_pre_attn_scalar=24),
    "glm4": dict(head_dim=8),
    "gpt_neox": dict(rotary_pct=0.5),
    "granite": dict(attention_multiplier=0.3, residual_multiplier=0.7),
    "mistral": WINDOW,
    "mixtral": dict(**WINDOW, **EXPERTS, num_local_experts=2),
    "olmo3": MIXED,
    "phi3": WINDOW,
    "qwen2": dict(**MIXED, use_sliding_window=True),
    "qwen3": dict(**MIXED, use_sliding_window=True, head_dim=16),
    "qwen3_moe": dict(**EXPERTS, num_experts=2, moe_intermediate_size=24, head_dim=8),
    "smollm3": dict(**MIXED, use_sliding_window=True, no_rope_layers=[1, 0]),
    "stablelm": dict(qk_layernorm=True, use_parallel_residual=True),
    "starcoder2": WINDOW,
}
T = 13
IDS = torch.randint(1, 97, (2, T), generator=torch.Generator().manual_seed(0))


def definition(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **_):
    """O = softmax(scale Q Kᵀ + mask) P⁻¹ V, all of it in memory; the mask is the one that transformers' eager attention adds."""
    groups, (n, d) = query.shape[1] // key.shape[1], key.shape[2:]
    visible = attention_mask == 0
    if sliding_window is not None:
        windows.add(type(module).__name__)
    unit = normalize(key, dim=-1)
    P = torch.exp(d**0.5 * (unit @ unit.mT - 1)).masked_fill(~visible, 0).tril(-1) + torch.eye(n, dtype=key.dtype)
    y = torch.linalg.inv(P) @ value
    scores = query @ key.repeat_interleave(groups, 1).mT * (d**-0.5 if scaling is None else scaling) + attention_mask
    return (scores.softmax(-1) @ y.repeat_interleave(groups, 1)).transpose(1, 2), None


windows = set()
AttentionInterface.register("lucid_definition", definition)
AttentionMaskInterface.register("lucid_definition", eager_mask)


@functools.cache
def build(kind: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **OWN.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lucid").eval().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.mul_(8 if "embed" not in name else 1)  # so that keys, values and scores matter
    return model


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return build(request.param)


def logits(model, ids, mask=None, position=None) -> torch.Tensor:
    if mask is not None:
        position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=position, use_cache=False).logits


def continued(model, ids, pieces, mask=None) -> torch.Tensor:
    """The logits of `ids` handed over in pieces, with a cache."""
    cache, at, found = DynamicCache(config=model.config), 0, []
    for n in pieces:
        seen = None if mask is None else mask[:, : at + n]
        position = None if mask is None else (seen.cumsum(-1) - 1).clamp(min=0)[:, at:]
        with torch.no_grad():
            out = model(ids[:, at : at + n], attention_mask=seen, position_ids=position, past_key_values=cache, use_cache=True)
        found.append(out.logits)
        at += n
    assert at == ids.shape[1]
    return torch.cat(found, 1)


def near(found, expected) -> bool:
    """Norms and rotations of these models round to float32, whatever the dtype: some dozens of roundings in a row."""
    return bool((found - expected).norm() <= 64 * torch.finfo(torch.float32).eps * expected.norm())


def test_it_is_the_definition(model):
    found = logits(model, IDS)
    model.set_attn_implementation("lucid_definition")
    expected = logits(model, IDS)
    model.set_attn_implementation("sdpa")
    plain = logits(model, IDS)
    model.set_attn_implementation("lucid")
    assert near(found, expected)
    assert (plain - expected).norm() > 1e-2 * expected.norm()  # else the test could not tell


def test_windows_are_tried():
    windows.clear()
    for kind in OWN:
        test_it_is_the_definition(build(kind))
    assert windows == {ARCHITECTURES[kind][1] for kind, own in OWN.items() if "sliding_window" in own}


def test_a_later_token_changes_no_earlier_bit(model):
    other = IDS.clone()
    other[:, 8:] = (other[:, 8:] + 7) % 96 + 1
    found, changed = logits(model, IDS), logits(model, other)
    assert torch.equal(found[:, :8], changed[:, :8])
    assert not torch.equal(found[:, 8:], changed[:, 8:])


@pytest.mark.parametrize("pieces", [(1,) * T, (5, 1, 4, 3), (2, 11)], ids=str)
def test_a_cache_is_the_whole_forward(model, pieces):
    assert near(continued(model, IDS, pieces), logits(model, IDS))


def test_rows_are_solved_in_blocks_under_a_window_too():
    model, ids = build("olmo3"), IDS.repeat(1, 11)
    whole = logits(model, ids)
    model.set_attn_implementation("lucid_definition")
    expected = logits(model, ids)
    model.set_attn_implementation("lucid")
    assert near(whole, expected)
    assert near(continued(model, ids, (70, 1, 72)), expected)


def test_a_left_padded_row_is_the_row_alone(model):
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    alone = logits(model, IDS[:1, 5:])
    for found in (logits(model, IDS * mask, mask), continued(model, IDS * mask, (7, 1, 1, 4), mask)):
        assert near(found[:1, 5:], alone)
        assert near(found[1:], logits(model, IDS[1:]))


def test_packed_documents_do_not_see_each_other(model):
    ids, lengths = IDS.reshape(1, -1), (9, 1, 11, 5)
    packed = logits(model, ids, position=torch.cat([torch.arange(n) for n in lengths])[None])
    assert near(packed, torch.cat([logits(model, part) for part in ids.split(lengths, 1)], 1))
    assert not near(packed, logits(model, ids))


# Refusals. What cannot be built small by SIZES alone, and what has no small form that is needed here (None).
OTHERS = {
    "bloom": {},
    "codegen": dict(rotary_dim=4, n_ctx=64),
    "xglm": dict(attention_heads=4, ffn_dim=48),
    "gemma2": dict(head_dim=8),
    "gpt_oss": dict(head_dim=8, num_local_experts=2, num_experts_per_tok=1),
    "deepseek_v3": None,
    "diffllama": {},
    "llama4_text": dict(head_dim=8, num_local_experts=2, intermediate_size_mlp=48),
    "gptj": dict(rotary_dim=4),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "falcon": {},
    "mpt": {},
    "gpt2": {},
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "bert": {},
    "modernbert": None,
    "t5": dict(d_kv=8, d_ff=48),
    "bart": dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4),
    "whisper": None,
    "qwen2_vl": None,
    "llava": None,
    "mamba": None,
}
SMALL = [kind for kind, own in OTHERS.items() if own is not None]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("by", ["argument", "config"])
def test_another_architecture_is_refused_where_it_is_built(kind, by):
    with torch.device("meta"), pytest.raises(NotImplementedError, match=f"does not serve the architecture '{kind}'.*llama, "):
        if by == "argument":
            AutoModel.from_config(AutoConfig.for_model(kind), attn_implementation="lucid")
        else:
            AutoModel.from_config(AutoConfig.for_model(kind, attn_implementation="lucid"))


@pytest.mark.parametrize("kind", SMALL)
def test_another_architecture_is_refused_where_lucid_is_set_later(kind):
    model = AutoModel.from_config(AutoConfig.for_model(kind, **{**SIZES, **OTHERS[kind]})).eval()
    inputs = dict(input_ids=IDS, decoder_input_ids=IDS) if kind == "t5" else dict(input_ids=IDS)
    before = model(**inputs)[0]
    refused = pytest.raises(NotImplementedError, match=f"does not serve the architecture '{kind}'")
    for name in ("lucid", {"": "lucid"}):
        with refused:
            model.set_attn_implementation(name)
    assert torch.equal(model(**inputs)[0], before)
    for part in model.modules():  # past all checks; the mask refuses
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = "lucid"
    with refused:
        model(**inputs)


@pytest.mark.slow
def test_every_other_causal_model_of_transformers_is_refused():
    no_default = {"gemma4_assistant", "musicgen", "musicgen_melody"}  # in some version their defaults are invalid
    for kind in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ARCHITECTURES) - no_default:
        with torch.device("meta"), pytest.raises(NotImplementedError, match="does not serve the architecture"):
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind), attn_implementation="lucid")


@pytest.mark.parametrize(
    "keyword",
    ["softcap", "s_aux", "sinks", "position_bias", "head_mask", "cu_seq_lens_q", "encoder_hidden_states", "chunk_size"],
)
@pytest.mark.parametrize("value", [None, 3.0])
def test_an_unknown_keyword_is_refused(keyword, value):
    with pytest.raises(TypeError, match=f"LlamaAttention passes the keyword '{keyword}'.*{HARMLESS[0]}"):
        build("llama")(IDS, **{keyword: value})


def test_a_known_keyword_must_not_ask_for_what_is_not_done():
    model = build("llama")
    with pytest.raises(ValueError, match=r"output_attentions=True, expected one of \(None, False\)"):
        model(IDS, output_attentions=True)
    with pytest.raises((NotImplementedError, ValueError), match=r"is not causal|is_causal=False"):  # some make a mask of it
        model(IDS, is_causal=False)


def test_keywords_of_losses_and_outputs_change_nothing():
    model = build("qwen3_moe")
    with torch.no_grad():
        out = model(
            IDS, labels=IDS, num_items_in_batch=torch.tensor(24), ignore_index=-100, is_causal=True, output_attentions=False,
            output_hidden_states=True, output_router_logits=True, use_cache=True,
        )  # fmt: skip
    assert torch.equal(out.logits, logits(model, IDS))


def test_a_forward_of_ones_own_is_refused_and_a_subclass_without_one_is_not():
    model = build("llama")
    attention = model.model.layers[0].self_attn

    class Wrapped(type(attention)):  # as FSDP does
        pass

    class Other(type(attention)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    check_module(Wrapped(model.config, 0))
    with pytest.raises(NotImplementedError, match=r"attention by .*Other.forward, expected .*LlamaAttention.forward"):
        check_module(Other(model.config, 0))


def test_attention_that_looks_ahead_is_refused():
    for kind, own in (("llama", dict(is_causal=False)), ("gemma3_text", dict(use_bidirectional_attention=True, head_dim=8))):
        config = AutoConfig.for_model(kind, **{**SIZES, **own})
        with pytest.raises(NotImplementedError, match="is not causal"):
            AutoModel.from_config(config, attn_implementation="lucid")(IDS)


def test_a_mask_of_the_users_own_is_obeyed_or_refused():
    model, documents = build("llama"), torch.arange(T) // 5
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    alone = torch.cat([logits(model, part) for part in IDS.split(5, 1)], 1)
    own = (causal & (documents == documents[:, None]))[None, None]
    position = torch.cat([torch.arange(n) for n in (5, 5, 3)])[None]
    call = lambda mask: model(IDS, attention_mask=mask, position_ids=position, use_cache=False).logits
    assert near(call(own), alone)
    ahead = own.clone()
    ahead[..., 2, 3] = True
    with pytest.raises(NotImplementedError, match="shows a query a later key"):
        call(ahead)
    with pytest.raises(TypeError, match=r"torch.float32, expected torch.bool"):
        call(own.float())
    for shape in ((1, 4, T, T), (3, 1, T, T), (1, 1, T, T + 1)):
        with pytest.raises(ValueError, match=r"attention_mask has shape .*, expected \(2 or 1, 1, 13, 13\)"):
            call(torch.zeros(shape, dtype=torch.bool))


def test_a_window_that_no_mask_shows_is_refused():
    attention, x = build("llama").model.layers[0].self_attn, torch.randn(1, 4, 3, 8)
    lucid_attention(attention, x, x, x.clone(), None, sliding_window=3)
    with pytest.raises(ValueError, match="3 keys, a window of 2 and no mask"):
        lucid_attention(attention, x, x, x.clone(), None, sliding_window=2)


VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)  # fmt: skip


def seeing(config):
    """A vision-language model whose text part alone attends with "lucid"."""
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation={"text_config": "lucid"}).eval().double()


def test_the_text_part_of_a_vision_language_model_is_the_listed_architecture():
    text = AutoConfig.for_model("llama", **SIZES)
    vision = AutoConfig.for_model("clip_vision_model", **VISION, projection_dim=32)
    model = seeing(LlavaConfig(text_config=text, vision_config=vision, image_token_index=96))
    plain = AutoModelForCausalLM.from_config(text, attn_implementation="lucid").eval().double()
    plain.model.load_state_dict(model.model.language_model.state_dict())
    plain.lm_head.load_state_dict(model.lm_head.state_dict())
    ids = IDS.clamp(max=95)
    assert torch.equal(logits(model, ids), logits(plain, ids))
    with pytest.raises(NotImplementedError, match="does not serve the architecture 'llava'"):
        model.set_attn_implementation("lucid")  # its eyes are not causal
    assert model.model.vision_tower.config._attn_implementation == "sdpa"


def test_image_tokens_that_see_each_other_are_refused():
    text = dict(**SIZES, **MIXED, head_dim=8)
    model = seeing(
        Gemma3Config(
            text_config=text, vision_config=dict(VISION, model_type="siglip_vision_model"), mm_tokens_per_image=4,
            image_token_index=96, boi_token_index=95, eoi_token_index=94,
        )
    )  # fmt: skip
    ids = IDS[:1].clamp(max=93)
    ids[0, 2:6] = 96
    with pytest.raises(NotImplementedError, match="shows a query a later key"):
        model(ids, pixel_values=torch.zeros(1, 3, 8, 8, dtype=torch.float64), token_type_ids=(ids == 96).long())
