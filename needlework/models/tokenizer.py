"""The tokenizer in a checkpoint's folder, as AutoTokenizer reads it: the text of tokens, where texts begin and end, the chat template."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

Messages = Sequence[Mapping[str, str]]


class Vocabulary(NamedTuple):
    """tokenizer: of the `tokenizers` library. begin: the token that begins a text. ends: those that end one. chat: the text that a
    conversation is to the model, up to where its answer begins; it raises ValueError where the template refuses. None: no template."""

    tokenizer: Tokenizer
    begin: int | None
    ends: frozenset[int]
    chat: Callable[[Messages], str] | None


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder, or of a name on the Hub. ValueError if it is missing, torn or not of the `tokenizers` library."""
    try:
        found = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: AutoTokenizer reads no tokenizer there: {error}") from None
    if not isinstance(found, PreTrainedTokenizerFast):
        raise ValueError(f"{source}: its tokenizer is a {type(found).__name__}, expected one with a tokenizer.json")
    return found


def load_vocabulary(folder: Path) -> Vocabulary:
    """ValueError names the folder whose tokenizer is missing, torn or not of the `tokenizers` library."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a checkpoint's folder")
    found = load_tokenizer(folder)
    ends: set[int] = set() if found.eos_token_id is None else {found.eos_token_id}
    if (folder / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(folder).eos_token_id
        ends |= set() if more is None else {more} if isinstance(more, int) else set(more)

    def chat(messages: Messages) -> str:
        try:
            said = found.apply_chat_template([dict(one) for one in messages], tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses: {error}") from None
        assert isinstance(said, str)
        return said

    return Vocabulary(found.backend_tokenizer, found.bos_token_id, frozenset(ends), chat if found.chat_template else None)
