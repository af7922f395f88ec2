"""The language model in transformers: generation with a cache, padding, beams, round trips, checkpointing."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from needlework.layers import (
    CCQ,
    Attention,
    Canon,
    Carve,
    Delta,
    GatedConv,
    Lucid,
    Mamba3,
    Memory,
    Polar,
    QDelta,
    Recurrent,
    Rope,
    ScalarGate,
    Softmax,
    SwiGLU,
)
from needlework.models import NeedleworkCache, NeedleworkConfig, NeedleworkForCausalLM

MIXERS = {
    "Q": Recurrent(heads=2, key_dim=8, value_dim=8, write=QDelta()),
    "C": Recurrent(heads=2, key_dim=8, value_dim=8, write=Carve(rank=2, content_chunk=4)),
    "R": Recurrent(heads=2, key_dim=8, value_dim=8, write=Delta(gate=ScalarGate()), read=CCQ()),
    "S": Attention(heads=4, kv_heads=2, head_dim=8, attend=Softmax(window=5), position=Rope()),
    "L": Attention(heads=4, kv_heads=2, head_dim=8, attend=Lucid(), position=Rope()),
    "P": Attention(heads=4, kv_heads=2, head_dim=8, attend=Polar(), conv=Canon(), output_gate=True, memory=Memory()),
    "G": GatedConv(),
    "M": Mamba3(heads=2, key_dim=8, value_dim=8),
}


def config(layout="QCRSLPGM", **settings):
    return NeedleworkConfig(
        **{"vocab_size": 61, "hidden_size": 32, "layout": layout, "mixers": MIXERS, "mlp": SwiGLU(hidden=48)}
        | {"initializer_range": 0.2, "pad_token_id": 0} | settings
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return NeedleworkForCausalLM(config()).double().eval()


@pytest.fixture
def prompt():
    return torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(1))


def greedy(model, ids, n, mask=None):
    """Token by token without a cache."""
    for _ in range(n):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def test_generate_with_a_cache_is_the_full_forward(model, prompt):
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), greedy(model, prompt, 12))


def test_a_left_padded_row_is_the_row_alone(model, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :4], mask[1, :1] = 0, 0
    padded = model.generate(prompt * mask, attention_mask=mask, max_new_tokens=8, do_sample=False)
    alone = model.generate(prompt[:1, 4:], max_new_tokens=8, do_sample=False)
    assert torch.equal(padded[0, 4:], alone[0])
    assert torch.equal(padded, greedy(model, prompt * mask, 8, mask))
    with torch.no_grad():
        logits = model(prompt * mask, attention_mask=mask).logits[0, 4:]
        assert torch.allclose(logits, model(prompt[:1, 4:]).logits[0], rtol=0, atol=1e-12)


def test_packed_documents_are_separate_forwards(model, prompt):
    ends = torch.tensor([0, 9, 18, 27])
    with torch.no_grad():
        packed = model(prompt.reshape(1, -1), cu_seqlens=ends).logits
        assert torch.allclose(packed[0], model(prompt).logits.flatten(0, 1), rtol=0, atol=1e-12)


def test_documents_packed_by_transformers_collator_are_separate_forwards(model, prompt):
    rows = [{"input_ids": row.tolist()} for row in (prompt[0, :5], prompt[1, :1], prompt[2])]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collator(rows)
    tokens = {"input_ids": batch["input_ids"], "use_cache": False}
    with torch.no_grad():
        alone = [model(torch.tensor([row["input_ids"]]), use_cache=False).logits for row in rows]
        for name in ("position_ids", "seq_idx", "cu_seq_lens_q"):
            torch.testing.assert_close(model(**tokens, **{name: batch[name]}).logits, torch.cat(alone, 1))
        torch.testing.assert_close(model(**batch, use_cache=False).logits, torch.cat(alone, 1))


@pytest.mark.parametrize(
    "said, message",
    [
        ({"position_ids": [[0, 1, 2, 4]]}, "position_ids: they skip"),
        (
            {"position_ids": [[0, 1, 0, 1]]},
            "position_ids: documents begin inside the rows of a batch of 2; expected .* one row",
        ),
        ({"seq_idx": [[0, 0, 0, 1], [0, 0, 0, 0]]}, "seq_idx: documents begin inside"),
        ({"seq_idx": [[0, 0, 0]]}, r"seq_idx: got shape \[1, 3\], expected \[2, 4\] or \[1, 4\]"),
        ({"cu_seq_lens_q": [0, 4], "attention_mask": [[0, 1, 1, 1]] * 2}, "two ways to say one thing"),
    ],
)
def test_packing_that_cannot_be_meant_is_refused(model, prompt, said, message):
    with pytest.raises(ValueError, match=message):
        model(prompt[:2, :4], **{name: torch.tensor(value) for name, value in said.items()})


@pytest.mark.parametrize(
    "said",
    [{"position_ids": [[0, 1, 0, 1]]}, {"cu_seqlens": [0, 2, 4]}, {"attention_mask": [[1, 1, 1, 1]]}, {"use_cache": True}],
)
def test_a_part_of_a_sequence_takes_nothing_that_needs_the_whole(model, prompt, said):
    said = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in said.items()}
    with pytest.raises(
        ValueError, match="state_passing: a sequence split over ranks takes no cache, no attention_mask and no packed"
    ):
        model(prompt[:1, :4], state_passing=object(), **said)


def test_positions_of_a_padded_batch_say_nothing_new(model, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :4], mask[1, 6:] = 0, 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        expected = model(prompt, attention_mask=mask).logits
        assert torch.equal(model(prompt, attention_mask=mask, position_ids=positions).logits, expected)


def test_beam_search_with_a_cache_is_beam_search_without(model, prompt):
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(prompt, **beams), model.generate(prompt, use_cache=False, **beams))


def test_several_samples_of_one_prompt(model, prompt):
    assert model.generate(prompt, max_new_tokens=3, num_return_sequences=2, do_sample=True).shape == (6, 12)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: None, [0, 1, 2]),
    ],
)
def test_rows_of_a_cache_are_picked_and_repeated_and_its_positions_counted(model, prompt, change, rows):
    cache = model(prompt, use_cache=True).past_key_values
    assert cache.get_seq_length() == 9
    change(cache)
    logits = model(prompt[rows, :2], past_key_values=cache).logits
    whole = model(torch.cat([prompt, prompt[:, :2]], 1)[rows], use_cache=False).logits
    torch.testing.assert_close(logits, whole[:, 9:], rtol=0, atol=1e-12)
    assert cache.get_seq_length() == 11
    assert {layer.get_mask_sizes(3) for layer in cache.layers} == {(14, 0)}
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(prompt, past_key_values=cache).logits[rows], whole[:, :9], rtol=0, atol=1e-12)


def test_what_would_roll_a_state_back_is_refused(model, prompt):
    with pytest.raises(ValueError):
        model.generate(prompt[:1], max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=2)
    cache = model(prompt, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot be rolled back"):
        cache.layers[0].crop(-2)


def test_a_foreign_cache_is_refused(model, prompt):
    from transformers import DynamicCache

    with pytest.raises(TypeError, match="got DynamicCache, expected NeedleworkCache"):
        model(prompt, past_key_values=DynamicCache())


def test_checkpointing_changes_no_gradient(prompt):
    torch.manual_seed(0)
    model = NeedleworkForCausalLM(config()).train()

    def gradients():
        model.zero_grad()
        model(prompt, labels=prompt).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_block_that_runs_again_keeps_a_sum_and_not_its_summands(prompt, checkpointing):
    model, given = NeedleworkForCausalLM(config()).train(), []
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.model.blocks[1].register_forward_pre_hook(lambda _, arguments: given.append(arguments[1]))
    model(prompt)
    assert (given[0] is None) == checkpointing


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_loads_with_auto_classes_as_it_was(tmp_path, prompt, tied):
    torch.manual_seed(0)
    model = NeedleworkForCausalLM(config(tie_word_embeddings=tied, head_bias=not tied, softcap=15.0)).eval()
    model.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    assert not list(tmp_path.glob("*.bin"))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (again.lm_head.weight is again.model.embed.weight) == tied
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    with torch.no_grad():
        assert torch.equal(again.eval()(prompt).logits, model(prompt).logits)


def test_softcap_bounds_the_logits(prompt):
    torch.manual_seed(0)
    plain, capped = (NeedleworkForCausalLM(config("Q", softcap=c)).eval() for c in (None, 2.0))
    capped.load_state_dict(plain.state_dict())
    z = plain(prompt).logits
    assert torch.allclose(capped(prompt).logits, 2 * z / (z.square() + 4).sqrt())


def test_zero_output_starts_as_the_embedding_alone(prompt):
    model = NeedleworkForCausalLM(config(zero_output=True, tie_word_embeddings=False)).eval()
    hidden = model.model(prompt).last_hidden_state
    assert torch.equal(hidden, model.model.norm(model.model.embed(prompt)))
    assert not model(prompt).logits.any()


def test_scaled_output_divides_what_goes_back_into_the_residual_stream_by_the_root_of_the_layers():
    plain, scaled = config("QQQQ"), config("QQQQ", scaled_output=True)
    torch.manual_seed(0)
    one = NeedleworkForCausalLM(plain).state_dict()
    torch.manual_seed(0)
    for name, p in NeedleworkForCausalLM(scaled).state_dict().items():
        half = name.endswith(("mixer.o_proj.weight", "mlp.down_proj.weight"))
        assert torch.equal(p, one[name] / 2 if half else one[name]), name


def test_hidden_states_are_one_a_block_and_the_embedding(model, prompt):
    states = model(prompt, output_hidden_states=True).hidden_states
    assert len(states) == len(model.config.layout) + 1


def test_hidden_states_of_a_padded_row_are_those_of_the_row_alone(model, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :4], mask[1, 6:] = 0, 0
    with torch.no_grad():
        out = model.model(prompt, attention_mask=mask, output_hidden_states=True)
        alone = model.model(prompt[:1, 4:], output_hidden_states=True).hidden_states
    assert all(x.shape == (3, 9, 32) and not x[~mask.bool()].any() for x in out.hidden_states)
    assert out.hidden_states[-1] is out.last_hidden_state
    for padded, plain in zip(out.hidden_states, alone, strict=True):
        torch.testing.assert_close(padded[:1, 4:], plain, rtol=0, atol=1e-12)
    assert torch.equal(alone[0], model.model.embed(prompt[:1, 4:]))
    with torch.no_grad():
        x, more, _, _ = model.model.blocks[0](alone[0], None, None, None, False)
    torch.testing.assert_close(alone[1], x + more, rtol=0, atol=1e-12)


def test_weights_of_attention_are_refused_and_not_left_out(model, prompt):
    with pytest.raises(ValueError, match="output_attentions: a recurrent layer has no attention weights"):
        model(prompt, output_attentions=True)


@pytest.mark.parametrize(
    "kind", ["static", "offloaded_static", "offloaded", "quantized", "sliding_window", "hybrid_chunked", "quantised"]
)
def test_another_cache_is_refused_and_not_ignored(model, prompt, kind):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(prompt, max_new_tokens=2, cache_implementation=kind)


def test_a_cache_that_grows_is_ours(model, prompt):
    plain = {"max_new_tokens": 4, "do_sample": False}
    made = model.generate(prompt, cache_implementation="dynamic", return_dict_in_generate=True, **plain)
    assert isinstance(made.past_key_values, NeedleworkCache) and torch.equal(made.sequences, model.generate(prompt, **plain))


def test_generation_goes_on_from_its_cache_and_from_embeddings(model, prompt):
    plain = {"do_sample": False, "return_dict_in_generate": True}
    whole = model.generate(prompt, max_new_tokens=7, **plain).sequences
    first = model.generate(prompt, max_new_tokens=3, **plain)
    again = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=4, **plain)
    assert torch.equal(again.sequences, whole)
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(prompt), max_new_tokens=7, **plain)
    assert torch.equal(embedded.sequences, whole[:, 9:])
    chunked = model.generate(prompt, prefill_chunk_size=4, max_new_tokens=7, **plain)
    assert torch.equal(chunked.sequences, whole)
    guided = {"guidance_scale": 1.5, "negative_prompt_ids": prompt.flip(1), "max_new_tokens": 5}
    uncached = model.generate(prompt, use_cache=False, **guided, **plain).sequences
    assert torch.equal(model.generate(prompt, **guided, **plain).sequences, uncached)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": False, "head_bias": True}])
def test_more_tokens_leave_the_logits_of_the_others(tmp_path, prompt, settings):
    model = NeedleworkForCausalLM(config("QS", **settings)).eval()
    before = model(prompt).logits
    model.resize_token_embeddings(70)
    after = model(prompt).logits
    assert after.shape == (3, 9, 70) and model.config.vocab_size == 70
    assert torch.equal(after[..., :61], before) and (model.lm_head.weight is model.model.embed.weight) == (not settings)
    model.save_pretrained(tmp_path)
    assert torch.equal(NeedleworkForCausalLM.from_pretrained(tmp_path).eval()(prompt).logits, after)


def test_a_checkpoint_in_many_files_is_the_model(tmp_path, model, prompt):
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = NeedleworkForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(prompt).logits, model(prompt).logits, rtol=0, atol=1e-12)


def test_a_device_map_holds_the_whole_model_or_is_refused(tmp_path, model, prompt):
    model.save_pretrained(tmp_path)
    again = NeedleworkForCausalLM.from_pretrained(tmp_path, device_map="cpu", dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(prompt).logits, model(prompt).logits, rtol=0, atol=1e-12)
    places = {"model.embed": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.blocks": "disk"}
    with pytest.raises(ValueError, match=r"device_map: .* offloads weights"):
        NeedleworkForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "rest")


def test_without_return_dict_the_output_is_a_tuple(model, prompt):
    with torch.no_grad():
        loss, logits, *_ = model(prompt, labels=prompt, return_dict=False)
        expected = model(prompt, labels=prompt)
        always = NeedleworkForCausalLM(config("Q", return_dict=False)).eval()
        assert isinstance(always(prompt), tuple) and always(prompt, return_dict=True).logits.shape == (3, 9, 61)
    assert torch.equal(loss, expected.loss) and torch.equal(logits, expected.logits)


def test_bad_inputs_say_what_was_expected(model, prompt):
    with pytest.raises(ValueError, match="layout is empty"):
        NeedleworkForCausalLM(config(""))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"input_ids: got shape \[9\], expected \[B, T\]"):
        model(prompt[0])
    with pytest.raises(ValueError, match="attention_mask: expected"):
        model(prompt, attention_mask=torch.ones(3, 4))


def test_no_token_and_one_token_run(model):
    assert model(torch.zeros(2, 0, dtype=torch.int64)).logits.shape == (2, 0, 61)
    assert model(torch.ones(2, 1, dtype=torch.int64)).logits.shape == (2, 1, 61)
