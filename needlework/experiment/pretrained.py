"""The model in a checkpoint's folder: config.json and model.safetensors (or its parts and their index)."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from needlework.json_file import read_json
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, disable_progress_bar

INDEX = "model.safetensors.index.json"


def load_model(folder: Path, config: NeedleworkConfig | None = None) -> NeedleworkForCausalLM:
    """The model, of its own config or, with the same weights, of another.

    ValueError names the folder, and the file that is missing, torn or another model's.
    """
    if not any((folder / name).is_file() for name in ("model.safetensors", INDEX)) or not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: expected a folder with config.json and model.safetensors")
    described = read_json(folder / "config.json")
    kind = described.get("model_type") if isinstance(described, dict) else None
    if kind != NeedleworkConfig.model_type:
        raise ValueError(f"{folder / 'config.json'}: model_type is {kind!r}, expected {NeedleworkConfig.model_type!r}")
    if config is None:
        try:
            config = NeedleworkConfig.from_dict(described)
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None
    if (folder / INDEX).is_file():
        read_json(folder / INDEX)  # transformers' own error does not name a torn file
    disable_progress_bar()
    try:
        loaded: Any = NeedleworkForCausalLM.from_pretrained(  # a pair, with output_loading_info
            folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except SafetensorError as error:
        raise ValueError(f"{folder}: model.safetensors, or a part of it, is torn ({error})") from None
    model, found = loaded
    wrong = {what: sorted(map(str, names)) for what, names in found.items() if names}
    if wrong:
        differing = "; ".join(f"{what.replace('_', ' ')}: {', '.join(names[:4])}" for what, names in wrong.items())
        raise ValueError(f"{folder} holds another model ({differing})")
    return model


def grown(folder: Path, config: NeedleworkConfig) -> NeedleworkForCausalLM:
    """The model of `config`, with the weights in the folder, of a smaller model, and its own start where there are none.

    ValueError, with their names, for weights in the folder that the model does not have, or has in another shape.
    """
    model = NeedleworkForCausalLM(config)
    there, here = load_model(folder).state_dict(), model.state_dict()
    shape = lambda x: "absent" if x is None else list(x.shape)
    if wrong := [name for name, x in there.items() if shape(here.get(name)) != list(x.shape)]:
        differing = "; ".join(f"{name}: {list(there[name].shape)} there, {shape(here.get(name))} here" for name in wrong[:4])
        raise ValueError(f"{folder} holds no model that this one grows from ({differing})")
    model.load_state_dict(there, strict=False)
    return model
