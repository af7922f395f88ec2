"""The one model config: a layout string over mixers that are configs themselves. config.json holds all of it."""

import string
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from needlework.layers import MIXERS, MLPS, Config, from_dict
from needlework.layers.config import nearest

_OURS = ("layout", "mixers", "mlp", "hidden_size", "softcap", "head_bias", "initializer_range", "zero_output")
_LAYER_TYPES = {"recurrent": "linear_attention", "gated_conv": "linear_attention", "attention": "full_attention"}


@strict
class NeedleworkConfig(PreTrainedConfig):
    """A language model of any mixers.

    layout: one letter a layer, e.g. "CCCS" * 6; mixers: {letter: mixer config}; mlp: a channel mixer's config (both as
        `Config.to_dict` writes them; Config objects are taken too). hidden_size: D.
    softcap: c of c·z/√(z² + c²) on the logits, or None. head_bias: of the unembedding (untied only).
    initializer_range: standard deviation of matrices and embeddings; None keeps PyTorch's own starts.
    zero_output: every projection back into the residual stream, and the unembedding, starts at zero.
    """

    model_type = "needlework"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 257
    hidden_size: int = 64
    layout: str = ""
    mixers: Any = None
    mlp: Any = None
    tie_word_embeddings: bool = True
    softcap: float | None = None
    head_bias: bool = False
    initializer_range: float | None = 0.02
    zero_output: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, num_hidden_layers: int | None = None, layer_types: list[str] | None = None, **kwargs):
        """num_hidden_layers, layer_types: of a file that says them; they follow from the layout, which may be another now."""
        self.mixers = {letter: _plain(mixer) for letter, mixer in (self.mixers or {}).items()}
        self.mlp = None if self.mlp is None else _plain(self.mlp)
        self.num_hidden_layers = len(self.layout)
        for letter in self.layout:
            if letter not in self.mixers:
                raise ValueError(
                    f"layout {self.layout!r}: no mixer for {letter!r}; mixers has {', '.join(self.mixers) or 'none'}"
                )
        self.layer_types = [_LAYER_TYPES.get(self.mixers[letter].get("kind"), "full_attention") for letter in self.layout]
        super().__post_init__(**kwargs)

    def mixer(self, letter: str) -> Config:
        """The mixer config of a letter of the layout."""
        return _of(from_dict(self.mixers[letter]), MIXERS, f"mixers[{letter!r}]")

    def replaced(self, **fields) -> "NeedleworkConfig":
        """The same with other values of some fields; what follows from them follows."""
        return type(self).from_dict(self.to_dict() | fields)

    def with_mixer(self, layer: int, mixer: Config) -> "NeedleworkConfig":
        """The same with another mixer in one layer, under a letter of its own, e.g. a bound on one layer's retention.

        A trained model takes it if the parameters are alike: `from_pretrained(path, config=config.with_mixer(...))`.
        IndexError for a layer that is not there.
        """
        layout = list(self.layout)
        layout[layer] = next(letter for letter in string.ascii_letters if letter not in self.mixers)
        return self.replaced(layout="".join(layout), mixers=self.mixers | {layout[layer]: mixer.to_dict()})

    def full_context(self) -> "NeedleworkConfig":
        """The same with no window in any attention layer; a trained model takes it as it takes `with_mixer`'s."""
        opened = {
            letter: mixer | {"attend": mixer["attend"] | {"window": None}} if "attend" in mixer else mixer
            for letter, mixer in self.mixers.items()
        }
        return self.replaced(mixers=opened)

    def channel_mixer(self) -> Config | None:
        """The MLP's config, or None for blocks without one."""
        return None if self.mlp is None else _of(from_dict(self.mlp), MLPS, "mlp")


def _plain(config: Config | dict[str, Any]) -> dict[str, Any]:
    """A component config as a dict, checked by building it once."""
    config = config if isinstance(config, Config) else from_dict(config)
    return config.to_dict()


def _of(config: Config, kinds: tuple[type[Config], ...], where: str) -> Config:
    if not isinstance(config, kinds):
        names = [k.kind for k in kinds]
        raise ValueError(f"{where}: got kind {config.kind!r}{nearest(config.kind, names)}, expected one of {', '.join(names)}")
    return config
