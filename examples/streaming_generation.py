"""Text as it is made, token by token, with a cache.

You learn: a `NeedleworkForCausalLM` is a transformers model: `generate` with a streamer prints each token when it is there. The loop
below does the same by hand: the prompt once, then one token at a time with `past_key_values`. A recurrent layer's cache keeps its
size; an attention layer's grows.

The model is random and says nonsense; each way says the same nonsense.
"""

import torch
from transformers import PreTrainedTokenizerFast, TextStreamer

from needlework.data import byte_tokenizer
from needlework.layers import Attention, QDelta, Recurrent, Rope, Softmax, SwiGLU
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM

NEW = 24


def main() -> None:
    torch.manual_seed(0)
    mixers = {
        "R": Recurrent(heads=2, key_dim=16, value_dim=16, write=QDelta()),
        "A": Attention(heads=2, head_dim=16, attend=Softmax(), position=Rope()),
    }
    config = NeedleworkConfig(hidden_size=32, layout="RA", mixers=mixers, mlp=SwiGLU(hidden=64), initializer_range=0.5)
    model = NeedleworkForCausalLM(config).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    prompt = tokenizer("def main(", return_tensors="pt").input_ids

    streamer = TextStreamer(tokenizer)  # prints; TextIteratorStreamer hands the text to another thread
    generated = model.generate(prompt, max_new_tokens=NEW, do_sample=False, streamer=streamer)

    recurrent, attention = (block.mixer for block in model.model.blocks)
    bytes_at = lambda mixer: [mixer.state_size(T, torch.float32) for T in (100, 1000)]
    tokens, cache = prompt, None
    with torch.no_grad():
        step = prompt
        for _ in range(NEW):
            out = model(step, past_key_values=cache, use_cache=True)
            cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, step], 1)
        whole = model(tokens).logits[:, prompt.shape[1] - 1 : -1].argmax(-1)
    assert torch.equal(tokens, generated)  # by hand = generate
    assert torch.equal(tokens[:, prompt.shape[1] :], whole)  # with a cache = all tokens at once
    assert cache.get_seq_length() == tokens.shape[1] - 1

    (small, same), (short, long) = bytes_at(recurrent), bytes_at(attention)
    assert small == same and long > 9 * short
    print(f"state after 100 and 1,000 tokens: recurrent {small:,} and {same:,} bytes, attention {short:,} and {long:,}")


if __name__ == "__main__":
    main()
