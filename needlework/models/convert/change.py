"""Another rule in some layers of a model that exists: LUCID for softmax attention, CCQ for the plain read of a recurrence.

The weights stay. What the new rule brings starts as its layer does: LUCID brings nothing, CCQ one map and one bias a layer.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

from needlework.layers import CCQ, Attention, Lucid, Recurrent, Softmax
from needlework.layers.config import MixerConfig, nearest
from needlework.models.config import NeedleworkConfig

ATTENDS, READS = ("lucid",), ("ccq",)


@dataclass(frozen=True, kw_only=True)
class Change:
    """attend: the attend rule that replaces softmax. read: the read rule of a recurrence. layers: which, from 0; None: all that have
    the rule which it replaces.

    >>> from needlework.layers import Attention, Softmax
    >>> from needlework.models import NeedleworkConfig
    >>> from needlework.models.convert import Change
    >>> mixers = {"a": Attention(heads=2, head_dim=8, attend=Softmax())}
    >>> config = NeedleworkConfig(vocab_size=64, hidden_size=16, layout="aaa", mixers=mixers)
    >>> [mixer.attend.kind for mixer in Change(attend="lucid", layers=(0, 2)).of(config).each_layer()]
    ['lucid', 'softmax', 'lucid']
    """

    attend: str | None = None
    read: str | None = None
    layers: Sequence[int] | None = None

    def __post_init__(self):
        for name, value, known in (("attend", self.attend, ATTENDS), ("read", self.read, READS)):
            if value is not None and value not in known:
                raise ValueError(f"{name}: unknown {value!r}{nearest(value, [*known])}, expected {' or '.join(known)}")

    def of(self, config: NeedleworkConfig) -> NeedleworkConfig:
        """The config with the other rule. ValueError for a layer that is not there, and for one that has no place for the rule."""
        if self.attend is None and self.read is None:
            if self.layers is not None:
                raise ValueError("layers: no rule is given that they should have; expected attend or read too")
            return config
        count = len(config.layout)
        if outside := [n for n in self.layers or () if not 0 <= n < count]:
            raise ValueError(f"layers: {outside[0]} is none of the model's {count}, expected 0 to {count - 1}")
        mixers = {letter: config.mixer(letter) for letter in dict.fromkeys(config.layout)}
        chosen = self.layers if self.layers is not None else [n for n in range(count) if self._fits(mixers[config.layout[n]])]
        if not chosen:
            raise ValueError(self._why(0, mixers[config.layout[0]]))
        letters, layout = {mixer: letter for letter, mixer in mixers.items()}, list(config.layout)
        for n in chosen:
            old = mixers[layout[n]]
            if not self._fits(old):
                raise ValueError(self._why(n, old))
            new = self._changed(old)
            if new not in letters:
                letters[new] = next(one for one in string.ascii_letters if one not in letters.values())
            layout[n] = letters[new]
        used = {letter: mixer.to_dict() for mixer, letter in letters.items() if letter in layout}
        return config.replaced(layout="".join(layout), mixers=used)

    def _fits(self, mixer: MixerConfig) -> bool:
        attends = isinstance(mixer, Attention) and isinstance(mixer.attend, Softmax)
        return (self.attend is None or attends) and (self.read is None or isinstance(mixer, Recurrent))

    def _changed(self, mixer: MixerConfig) -> MixerConfig:
        if isinstance(mixer, Attention):
            return replace(mixer, attend=Lucid(window=mixer.attend.window, scale=getattr(mixer.attend, "scale", None)))
        assert isinstance(mixer, Recurrent)
        return replace(mixer, read=CCQ())

    def _why(self, n: int, mixer: MixerConfig) -> str:
        if self.read is not None:
            return (
                f"read: layer {n} is {mixer.kind!r}. CCQ cleans the query that reads a recurrent state, o = Sᵀ(I − λΣ)q; attention has "
                "no such state, and what a cleaned query would score is not defined. Expected a recurrent layer (gla, retnet, "
                "delta_net, gated_deltanet, kda, mamba2, qdelta)"
            )
        rule = mixer.attend.kind if isinstance(mixer, Attention) else mixer.kind
        return (
            f"attend: layer {n} is {rule!r}. LUCID solves the values that softmax attention reads; expected a layer of softmax "
            "attention (llama, qwen3)"
        )
