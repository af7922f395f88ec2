"""Tokenizers for tests of serving: bytes, with and without a chat template, and one of words with bytes for what it does not know."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from needlework.data import byte_tokenizer
from needlework.models.checkpoint import write_tokenizer
from needlework.models.tokenizer import Vocabulary
from needlework.serve.text import Text

END = 256  # of the byte tokenizer
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('who asked?') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def folder(path, template=TEMPLATE):
    """A checkpoint's folder, as far as its tokenizer goes."""
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(byte_tokenizer(), "<|eot|>", path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def byte_text() -> Text:
    """Bytes, and a chat of `role: content` lines."""
    chat = lambda messages: "".join(f"{m['role']}: {m['content']}\n" for m in messages)
    return Text(Vocabulary(byte_tokenizer(), END, frozenset({END}), chat))


def words() -> Tokenizer:
    """SentencePiece's kind: a space is part of the word behind it, and a character that is no token is bytes."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "▁b", "中", "▁中"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "中")]
    model = models.BPE({token: i for i, token in enumerate(known)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer
