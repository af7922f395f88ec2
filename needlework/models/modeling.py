"""One ForCausalLM for every mixer, on one Model (`backbone.py`) of one Block (`block.py`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from needlework.layers.batch import Batch
from needlework.layers.norm import Later
from needlework.layers.objective import Objective
from needlework.layers.projection import Projection, mapped
from needlework.models.backbone import NeedleworkModel
from needlework.models.cache import NeedleworkCache
from needlework.models.config import NeedleworkConfig
from needlework.models.loss import softcap
from needlework.models.pretrained import NeedleworkPreTrainedModel
from needlework.models.results import Losses
from needlework.models.table_cache import TableCache


class NeedleworkForCausalLM(NeedleworkPreTrainedModel, GenerationMixin):
    """The model with its unembedding, tied or not: input_ids [B T] -> logits [B T V].

    It is a transformers model: `from_pretrained`, `generate`, Trainer and pipelines take it.

    >>> import torch
    >>> from needlework.layers import QDelta, Recurrent
    >>> from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
    >>> mixers = {"Q": Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta())}
    >>> model = NeedleworkForCausalLM(NeedleworkConfig(vocab_size=257, hidden_size=64, layout="QQ", mixers=mixers))
    >>> model(torch.randint(257, (2, 100))).logits.shape
    torch.Size([2, 100, 257])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012 (the name is transformers')

    def __init__(self, config: NeedleworkConfig):
        super().__init__(config)
        self.model = NeedleworkModel(config)
        self.lm_head = Projection(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def _prepare_cache_for_generation(  # pyrefly: ignore[bad-override] (transformers says that it returns a bool, and returns None)
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *sizes: Any
    ) -> None:
        """A NeedleworkCache, on a GPU a TableCache, unless generate() is given one or is to use none; ValueError for another
        `cache_implementation`."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={kind!r}: a needlework model keeps its layers' own states, which grow or not as the layer "
                "does; they are not made beforehand, quantised or offloaded. Expected None"
            )
        if model_kwargs.get("past_key_values") is not None:
            # transformers asks of `self` what its encoder-decoders have
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *sizes)  # pyrefly: ignore[bad-argument-type]
        elif generation_config.use_cache is not False:
            tokens = sizes[-1]  # the longest that this call can make
            on_gpu = self.device.type == "cuda"
            model_kwargs["past_key_values"] = (
                TableCache(self.config, self.model.held(), tokens) if on_gpu else NeedleworkCache(self.config)
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: NeedleworkCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        objective: Objective | None = None,
        loss_impl: str = "torch",
        emphasis: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | Losses:
        """As NeedleworkModel; labels [B T] are shifted inside, as everywhere in transformers.

        targets [B T], the token that follows each, −100 where it is not counted: for training. No logits are made then, and
        what comes back is `Losses`. objective: its other terms (None: cross entropy alone); loss_impl: `linear_cross_entropy`'s impl.
        emphasis [B T]: how many times each target is counted (None: once); with loss_impl "torch".
        """
        if targets is not None and labels is not None:
            raise ValueError("targets (aligned, summed) and labels (shifted inside, averaged) are two losses: give one")
        if objective is not None and targets is None:
            raise ValueError("objective: its terms are added to the cross entropy of targets; give targets too")
        out = self.model(
            input_ids, attention_mask, past_key_values, inputs_embeds,
            use_cache=use_cache, cu_seqlens=cu_seqlens, objective=objective, return_dict=True, **kwargs,
        )  # fmt: skip
        if targets is not None:
            cap = self.config.softcap
            losses = Losses.of(out.last_hidden_state, self.lm_head, cap, targets, emphasis, loss_impl)
            return losses if objective is None else losses.beside(objective, out.terms)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(out.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    @torch.no_grad()
    def serve(
        self, input_ids: Tensor, tables: Sequence[Mapping[str, Tensor]], batch: Batch, rows: Tensor | slice = slice(None)
    ) -> Tensor:
        """Logits [R V] of the chosen rows of new tokens input_ids [T] (`NeedleworkModel.serve`)."""
        return self.logits(self.model.serve(input_ids, tables, batch)[rows])

    def logits(self, hidden: Tensor | Later) -> Tensor:
        """Logits [.. V] of normed hidden states [.. D]."""
        return softcap(mapped(hidden, self.lm_head), self.config.softcap)


def register() -> None:
    """Make AutoConfig, AutoModel and AutoModelForCausalLM know "needlework". `import needlework.models` does it."""
    AutoConfig.register(NeedleworkConfig.model_type, NeedleworkConfig, exist_ok=True)
    AutoModel.register(NeedleworkConfig, NeedleworkModel, exist_ok=True)
    AutoModelForCausalLM.register(NeedleworkConfig, NeedleworkForCausalLM, exist_ok=True)
    # Trainer's label smoothing shifts labels, and a pipeline takes a model, if its name is in here
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NeedleworkConfig.model_type] = NeedleworkForCausalLM.__name__
