"""A source's tensors by their names: safetensors or PyTorch's pickles, in one file or in parts with an index."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from needlework.json_file import read_json

SAFE, PICKLED = "model.safetensors", ("pytorch_model.bin", "weights.pt", "model.pt")
WRAPPED = ("model", "state_dict")  # under which a training program may keep them
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """On the CPU, in their own dtype. ValueError names a file that is missing or torn, and a tensor that is quantised."""
    found: dict[str, Tensor] = {}
    for file in _files(folder):
        for name, x in _read(file).items():
            if x.dtype not in FLOATING:
                raise ValueError(f"{file}: {name} is {x.dtype}, a quantised tensor or none of a model; expected {FLOATING}")
            found[name] = x
    return found


def _files(folder: Path) -> list[Path]:
    for whole in (SAFE, *PICKLED):
        if (folder / whole).is_file():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.is_file():
            parts = sorted({*read_json(index)["weight_map"].values()})
            if missing := [part for part in parts if not (folder / part).is_file()]:
                raise ValueError(f"{folder}: {missing[0]} is missing, which {index.name} names")
            return [folder / part for part in parts]
    raise ValueError(f"{folder}: no weights there; expected {SAFE}, {' or '.join(PICKLED)}, or an index of their parts")


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        held: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file}: torn, or no file of tensors ({str(error).partition('. ')[0]})") from None
    for name in WRAPPED:
        if isinstance(held, dict) and isinstance(held.get(name), dict):
            held = held[name]
    if not isinstance(held, dict) or not all(isinstance(x, Tensor) for x in held.values()):
        raise ValueError(f"{file}: expected a state dict, names with a tensor each")
    return held
