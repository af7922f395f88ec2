"""The one model config: a layout string over mixers that are configs themselves. config.json holds all of it."""

import copy
import os
import string
from inspect import get_annotations
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from needlework.fields import Count, Natural, NonNegative, Positive, fitted
from needlework.layers import MIXERS, MLPS, Config, SquaredReLU, SwiGLU, from_dict
from needlework.layers.config import MixerConfig, nearest
from needlework.layers.norm import EPS
from needlework.models.auto import AUTO_MAP, Installed, write_module

_LAYER_TYPES = {mixer.kind: "full_attention" if mixer.kind == "attention" else "linear_attention" for mixer in MIXERS}
_FOLLOWING = ("num_hidden_layers", "layer_types")  # from the layout
_FIXED = ("layout", "mixers", "mlp", *_FOLLOWING)
# What transformers and its tools write beside a model's fields, PreTrainedConfig's and GenerationConfig's; names that begin with "_"
# are theirs too.
THEIRS = {
    "add_cross_attention", "attn_implementation", "auto_map", "cross_attention_hidden_size", "custom_pipelines",
    "distributed_config", "experts_implementation", "finetuning_task", "is_decoder", "model_type", "name_or_path", "num_labels",
    "per_layer_config", "prefix", "pruned_heads", "quantization_config", "sep_token_id", "task_specific_params",
    "tf_legacy_loss", "tie_encoder_decoder", "tie_last_hidden_states", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_weights", "use_bfloat16", "use_return_dict",
} | GenerationConfig().to_dict().keys()  # fmt: skip


class NeedleworkConfig(Installed, PreTrainedConfig):
    """A language model of any mixers.

    vocab_size: tokens. hidden_size: D, the width of the residual stream.
    layout: one letter a layer, e.g. "CCCS" * 6.
    mixers: {letter: mixer config}, as `Config.to_dict` writes it; Config objects are taken too.
    mlp: the channel mixer's config, SwiGLU or SquaredReLU; None: blocks without one.
    tie_word_embeddings: the unembedding is the embedding.
    norm_eps: of the norms before mixers and MLPs and of the last one; a mixer's own norms have 1e-6.
    softcap: c of c·z/√(z² + c²) on the logits, or None.
    head_bias: of the unembedding (untied only).
    initializer_range: standard deviation of matrices and embeddings; None keeps PyTorch's own starts.
    zero_output: every projection back into the residual stream, and the unembedding, starts at zero.
    scaled_output: every projection back into the residual stream starts divided by √layers, as Mamba's do.
    use_cache: as everywhere in transformers; so are pad_token_id, bos_token_id and eos_token_id.
    Raises ValueError, naming the field, for a value out of its range and for a key that neither this class nor transformers knows.

    >>> from needlework.layers import QDelta, Recurrent, SwiGLU
    >>> from needlework.models import NeedleworkConfig
    >>> mixers = {"Q": Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta())}
    >>> config = NeedleworkConfig(vocab_size=257, hidden_size=64, layout="QQ", mixers=mixers, mlp=SwiGLU(hidden=128))
    >>> config.num_hidden_layers, config.mixer("Q").write.kind
    (2, 'qdelta')
    """

    model_type = "needlework"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Trainer adds a list to it)

    vocab_size: Count = 257
    hidden_size: Count = 64
    layout: str = ""
    mixers: dict | None = None
    mlp: Any = None
    tie_word_embeddings: bool = True
    norm_eps: Positive = EPS
    softcap: Positive | None = None
    head_bias: bool = False
    initializer_range: NonNegative | None = 0.02
    zero_output: bool = False
    scaled_output: bool = False
    use_cache: bool = True
    pad_token_id: Natural | None = None
    bos_token_id: Natural | None = None
    eos_token_id: Natural | None = None

    def __post_init__(self, num_hidden_layers: int | None = None, layer_types: list[str] | None = None, **kwargs):
        """num_hidden_layers, layer_types: as a file says them; both follow from the layout."""
        for name in kwargs:
            if not (name in THEIRS or name.startswith("_")):
                raise ValueError(f"config: unknown key {name!r}{nearest(name, [*_FIELDS])}; known: {', '.join(_FIELDS)}")
        self.mixers = {letter: _plain(mixer, MIXERS, f"mixers[{letter!r}]") for letter, mixer in (self.mixers or {}).items()}
        self.mlp = None if self.mlp is None else _plain(self.mlp, MLPS, "mlp")
        for letter in self.layout:
            if letter not in self.mixers:
                raise ValueError(
                    f"layout {self.layout!r}: no mixer for {letter!r}; mixers has {', '.join(self.mixers) or 'none'}"
                )
        following = {
            "num_hidden_layers": len(self.layout),
            "layer_types": [_LAYER_TYPES[self.mixers[letter]["kind"]] for letter in self.layout],
        }
        for name, given in (("num_hidden_layers", num_hidden_layers), ("layer_types", layer_types)):
            if given not in (None, following[name]):
                raise ValueError(f"config: {name} is {given!r}, expected {following[name]!r}, as layout {self.layout!r} has it")
            setattr(self, name, following[name])
        kwargs.pop("auto_map", None)  # of a folder, not of a model
        super().__post_init__(**kwargs)
        self.validate()

    def __setattr__(self, key: str, value: Any) -> None:
        """ValueError for a value out of its field's range, and for another model in a config that is made."""
        if key in _FIXED and "layer_types" in self.__dict__ and value != getattr(self, key):
            raise ValueError(
                f"config: {key} is fixed once the config is made; expected config.replaced(layout=…, mixers=…, mlp=…)"
            )
        super().__setattr__(key, fitted("config", key, value, _FIELDS[key]) if key in _FIELDS else value)

    def mixer(self, letter: str) -> MixerConfig:
        """The mixer config of a letter of the layout."""
        config = from_dict(self._mixers()[letter])
        assert isinstance(config, MixerConfig)
        return config

    def each_layer(self) -> list[MixerConfig]:
        """The mixer config of every layer."""
        return [self.mixer(letter) for letter in self.layout]

    def _mixers(self) -> dict[str, dict[str, Any]]:
        """The field, which is a dict once the config is made."""
        assert self.mixers is not None
        return self.mixers

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """config.json, and what leads others from it to this class (`auto.py`)."""
        write_module(Path(save_directory))
        described = copy.copy(self)
        described.auto_map = AUTO_MAP
        super(NeedleworkConfig, described).save_pretrained(save_directory, push_to_hub, **kwargs)

    def replaced(self, **fields: Any) -> "NeedleworkConfig":
        """The same with other values of some fields; what follows from them follows."""
        kept = {name: value for name, value in self.to_dict().items() if name not in _FOLLOWING}
        return type(self).from_dict(kept | fields)

    def with_mixer(self, layer: int, mixer: Config) -> "NeedleworkConfig":
        """The same with another mixer in one layer, under a letter of its own, e.g. a bound on one layer's retention.

        A trained model takes it if the parameters are alike: `from_pretrained(path, config=config.with_mixer(...))`.
        IndexError for a layer that is not there.
        """
        layout, mixers = list(self.layout), self._mixers()
        layout[layer] = next(letter for letter in string.ascii_letters if letter not in mixers)
        return self.replaced(layout="".join(layout), mixers=mixers | {layout[layer]: mixer.to_dict()})

    def full_context(self) -> "NeedleworkConfig":
        """The same with no window in any attention layer; a trained model takes it as it takes `with_mixer`'s."""
        opened = {
            letter: mixer | {"attend": mixer["attend"] | {"window": None}} if "attend" in mixer else mixer
            for letter, mixer in self._mixers().items()
        }
        return self.replaced(mixers=opened)

    def channel_mixer(self) -> SwiGLU | SquaredReLU | None:
        """The MLP's config, or None for blocks without one."""
        config = None if self.mlp is None else from_dict(self.mlp)
        assert config is None or isinstance(config, MLPS)
        return config


def _plain(config: Config | dict[str, Any], kinds: tuple[type[Config], ...], where: str) -> dict[str, Any]:
    """A component config as a dict, checked by building it once."""
    if isinstance(config, dict):
        config = from_dict(config)
    if not isinstance(config, kinds):
        kind, names = getattr(config, "kind", config), [k.kind for k in kinds]
        raise ValueError(f"{where}: got kind {kind!r}{nearest(kind, names)}, expected one of {', '.join(names)}")
    return config.to_dict()


_FIELDS = get_annotations(NeedleworkConfig)
