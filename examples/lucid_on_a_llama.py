"""LUCID's attention in a model that somebody else wrote.

You learn: `import needlework.models` registers "lucid" with transformers; `attn_implementation="lucid"` then serves Llama, Qwen, Gemma
and others, with their weights as they are. Training, `generate` with a cache and padded batches work. From a checkpoint:
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="lucid")`.

    o = softmax(q Kᵀ/√d) P⁻¹V,  Pᵢⱼ = exp(√d (k̂ᵢ·k̂ⱼ − 1)), j <= i
"""

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import needlework.models  # noqa: F401 (registers "lucid")


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.2)
    softmax = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    lucid = AutoModelForCausalLM.from_config(config, attn_implementation="lucid").eval()
    lucid.load_state_dict(softmax.state_dict())  # the same parameters: LUCID adds none

    tokens = torch.randint(1, 97, (2, 12))
    with torch.no_grad():
        difference = (lucid(tokens).logits - softmax(tokens).logits).abs().max().item()
    print(f"the same weights under two attentions: logits differ by up to {difference:.2f}")
    assert difference > 0.1

    with_cache = lucid.generate(tokens, max_new_tokens=8, do_sample=False)
    without = lucid.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)

    optimizer = torch.optim.AdamW(lucid.train().parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = lucid(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"20 steps on two rows: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
