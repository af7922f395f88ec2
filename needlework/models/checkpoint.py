"""A trained model and its tokenizer as one folder that describes itself.

config.json, generation_config.json   the model, where its texts end, and what loads it (`auto.py`)
model.safetensors                     the weights, in several files where they are many
tokenizer.json, tokenizer_config.json the tokenizer as it was, and which of its tokens begin, end and pad
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from needlework.models.modeling import NeedleworkForCausalLM

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def save_checkpoint(
    model: NeedleworkForCausalLM,
    tokenizer: Tokenizer,
    end: int,
    directory: str | Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write the folder for AutoModelForCausalLM and AutoTokenizer: whole, in place of one that is there, or not at all.

    model: its config takes the ids of `end`, so that its generation ends where a text does.
    tokenizer: of the model's tokens.
    end: the id of the tokenizer's end of text. It begins texts too, since a document followed another in training. It also pads, since
        no other token is free: pads are masked, but DataCollatorForLanguageModeling then counts no end of text.
    directory: the folder.
    weights: the state dict, where the model's own is spread over ranks; None: the model's.
    Raises OSError, naming the folder, where it cannot be written; ValueError for an id that is no token of the tokenizer, and for a
    tokenizer with more tokens than the model has embeddings.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from needlework.data import byte_tokenizer
    >>> from needlework.layers import QDelta, Recurrent
    >>> from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, save_checkpoint
    >>> mixers = {"Q": Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta())}
    >>> model = NeedleworkForCausalLM(NeedleworkConfig(vocab_size=257, hidden_size=64, layout="QQ", mixers=mixers))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(model, byte_tokenizer(), 256, Path(folder) / "checkpoint")
    ...     (Path(folder) / "checkpoint" / "model.safetensors").is_file()
    True
    """
    size, token = tokenizer.get_vocab_size(), tokenizer.id_to_token(end)
    if token is None or size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer: end of text is {end}, {size} tokens; expected one of them, and at most vocab_size = {model.config.vocab_size}"
        )
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model.config = model.config.replaced(**ids)
    model.generation_config = GenerationConfig(**ids)
    with whole_folder(Path(directory)) as new:
        model.save_pretrained(new, state_dict=weights)
        write_tokenizer(tokenizer, token, new)


@contextmanager
def whole_folder(directory: Path) -> Iterator[Path]:
    """A folder to write a model's files into, which takes `directory`'s place when all are there; OSError names it where one cannot be."""
    new = directory.with_name(f"{directory.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        yield new
    except SafetensorError as error:
        raise OSError(f"{directory}: the model cannot be written ({error})") from error
    old = directory.with_name(f"{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)  # a kill between the two renames leaves both models on the disk
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def write_tokenizer(tokenizer: Tokenizer, end: str, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json, for AutoTokenizer to give the ids that needlework's `encode` gives.

    What a tokenizer would put around a text by itself (its post-processor) the model never saw: it is left out.
    """
    described = json.loads(tokenizer.to_str()) | {"post_processor": None}
    named = {
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
