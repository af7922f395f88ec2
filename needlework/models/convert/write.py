"""From a source to a checkpoint's folder: the layout, our config, the tensors under our names, the tokenizer as it is.

Everything is read and compared before anything is written.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from needlework.json_file import read_json
from needlework.models.checkpoint import whole_folder
from needlework.models.config import NeedleworkConfig
from needlework.models.hub import fetched
from needlework.models.modeling import NeedleworkForCausalLM

from .change import Change
from .described import Described
from .layout import Reading
from .layouts import LAYOUTS, layout_of
from .weights import read_weights

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
SLOW = ("tokenizer.model", "vocab.json")  # of tokenizers that transformers makes a tokenizer.json of
BESIDE = ("generation_config.json", "LICENSE*", "USE_POLICY*", "NOTICE*")
WANTED = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.txt") + (
    *TOKENIZER, *SLOW, *BESIDE,
)  # fmt: skip


class Converted(NamedTuple):
    """layout: its name. config: the model's. parameters: tied ones counted once. changed: the layers with another rule. new: tensors that
    the source does not have, which start as their layer does. tokenizer: whether the source has one."""

    layout: str
    config: NeedleworkConfig
    parameters: int
    changed: tuple[int, ...]
    new: tuple[str, ...]
    tokenizer: bool


def convert(source: str | Path, directory: Path, change: Change | None = None) -> Converted:
    """Write the model of `source`, in a layout of `LAYOUTS`, as a needlework checkpoint that computes the same.

    source: a folder, or a name on the Hugging Face Hub. directory: the checkpoint's folder, which is not there yet.
    change: another rule in some layers, whose weights stay.
    Raises ValueError for an unknown layout, and names a key of the config, a tensor or a shape that does not fit: one that is missing,
    one that is left over, one that needlework has no layer for. OSError where the folder cannot be written.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from needlework.models.convert import convert
    >>> small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(f"{folder}/llama")
    ...     convert(f"{folder}/llama", Path(folder) / "ours").layout
    'llama'
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory}: there is something there already, expected a new folder")
    folder = Path(source) if Path(source).is_dir() else fetched(str(source), WANTED)
    where = folder / "config.json"
    if not where.is_file():
        raise ValueError(f"{folder}: expected a folder with config.json and weights")
    described = Described(read_json(where), str(where))
    layout = layout_of(described)
    reading = LAYOUTS[layout](described)
    described.finish()
    config = (change or Change()).of(reading.config)
    model, new = assembled(reading, config, read_weights(folder), folder)
    model.generation_config = _generation(folder, config)
    fast = _tokenizer(folder)
    with whole_folder(directory) as made:
        model.save_pretrained(made)
        for pattern in (*TOKENIZER, *BESIDE[1:]):
            for file in folder.glob(pattern):
                shutil.copyfile(file, made / file.name)
        if fast is not None and not (made / TOKENIZER[0]).is_file():
            fast.save_pretrained(made)
    pairs = zip(reading.config.each_layer(), config.each_layer(), strict=True)
    changed = tuple(n for n, (before, after) in enumerate(pairs) if before != after)
    return Converted(layout, config, model.num_parameters(), changed, new, fast is not None)


def assembled(
    reading: Reading, config: NeedleworkConfig, weights: dict[str, Tensor], folder: Path
) -> tuple[NeedleworkForCausalLM, tuple[str, ...]]:
    """The model of `config` with the source's weights, and the names of the tensors that the source does not have."""
    with torch.device("meta"):
        model = NeedleworkForCausalLM(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    left = reading.parts(weights, folder)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in reading.names.items():
        if missing := [name for name in theirs if name not in left]:
            raise ValueError(f"{folder}: {missing[0]} is missing, which {ours} is made of")
        parts = [left.pop(name) for name in theirs]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        if x.shape != shapes[ours]:
            raise ValueError(
                f"{folder}: {' and '.join(theirs)} gives {ours} {[*x.shape]}, expected {[*shapes[ours]]} of its config"
            )
        tensors[ours] = x
    embedding = tensors["model.embed.weight"]
    if config.tie_word_embeddings and (head := left.pop("lm_head.weight", embedding)) is not embedding:
        if not torch.equal(head, embedding):
            raise ValueError(f"{folder}: tie_word_embeddings is true, and lm_head.weight is another tensor than the embedding")
    if left:
        raise ValueError(
            f"{folder}: {len(left)} tensors of it are left over, which its layout does not have: {', '.join(sorted(left)[:6])}"
        )
    new = tuple(name for name in shapes if name not in tensors)
    tensors |= _started(config, new, embedding.dtype)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = embedding
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return model, new


def _started(config: NeedleworkConfig, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of mixers as their layers start, from seed 0."""
    found = {}
    for n, letter in enumerate(config.layout):
        prefix = f"model.blocks.{n}.mixer."
        wanted = [name for name in names if name.startswith(prefix)]
        if wanted:
            torch.manual_seed(n)
            state = config.mixer(letter).build(config.hidden_size, n).state_dict()
            found |= {name: state[name.removeprefix(prefix)].to(dtype) for name in wanted}
    return found


def _generation(folder: Path, config: NeedleworkConfig) -> GenerationConfig:
    if (folder / BESIDE[0]).is_file():
        return GenerationConfig.from_pretrained(folder)
    ends = read_json(folder / "config.json").get("eos_token_id")
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": ends, "pad_token_id": config.pad_token_id}
    return GenerationConfig(**ids)


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The source's tokenizer, one of the `tokenizers` library; None if the source has none. ValueError for one of another kind."""
    if not any((folder / name).is_file() for name in (TOKENIZER[0], *SLOW)):
        return None
    found = AutoTokenizer.from_pretrained(folder)
    if not isinstance(found, PreTrainedTokenizerFast):
        raise ValueError(f"{folder}: its tokenizer is a {type(found).__name__}, expected one with a tokenizer.json")
    return found
