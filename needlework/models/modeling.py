"""One Block, one Model, one ForCausalLM for every mixer; the config builds the mixers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from needlework.layers.batch import Batch
from needlework.layers.norm import Later, RMSNorm
from needlework.layers.objective import Objective, Terms
from needlework.layers.projection import OutProjection, Projection, mapped
from needlework.layers.state import Held
from needlework.models.auto import Installed
from needlework.models.cache import NeedleworkCache
from needlework.models.config import NeedleworkConfig
from needlework.models.loss import emphasised_cross_entropy, linear_cross_entropy, softcap
from needlework.models.packing import documents
from needlework.models.table_cache import TableCache
from needlework.ops.linear.arguments import added


class StatePassing(Protocol):
    """How a sequence that is split over ranks goes on: each layer's state comes from the rank before and goes to the one after."""

    def receive(self, layer: int, x: Tensor) -> object:
        """The state of `layer` after the tokens before x [B T D]; None on the first rank."""

    def send(self, layer: int, x: Tensor, state: object) -> Tensor:
        """Hand the state after x on; returns x, tied to the state's gradient."""


class Losses(NamedTuple):
    """What training minimises on a batch: share · cross_entropy / counted targets + auxiliary, as the objective says.

    cross_entropy: the *sum* over the counted targets. auxiliary: the other terms, weighted, a mean that is divided by
    the number of batches alone; None without any. parts: those terms by name, unweighted and detached, for a log.
    nats: of each target [B T], without its emphasis and detached, 0 where it is not counted; None where none has an emphasis.
    """

    cross_entropy: Tensor
    share: float
    auxiliary: Tensor | None
    parts: dict[str, Tensor]
    nats: Tensor | None = None


@dataclass
class NeedleworkOutput(BaseModelOutputWithPast):
    """transformers' output and `terms`: the objective's means by name, or None without an objective."""

    terms: dict[str, Tensor] | None = None


class Block(GradientCheckpointingLayer):
    """One layer: x [B T D], a state -> x [B T D], the state after it, the objective's terms.

    x ← x + mixer(norm x),    x ← x + mlp(norm x)
    """

    def __init__(self, config: NeedleworkConfig, letter: str, layer: int):
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = config.mixer(letter).build(config.hidden_size, layer)
        mlp = config.channel_mixer()
        self.mlp_norm = None if mlp is None else RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = None if mlp is None else mlp.build(config.hidden_size)

    def forward(
        self,
        x: Tensor,
        state: object,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
        objective: Objective | None = None,
    ) -> tuple[Tensor, object, Terms | None]:
        h = self.mixer_norm(x)
        y, state = self.mixer(h, state, cu_seqlens, output_final_state)
        x = self._channels(x + y)
        return x, state, None if objective is None else objective.terms(self.mixer, h, x, cu_seqlens)

    def serve(self, given: "Residual", tables: Mapping[str, Tensor], batch: Batch) -> "Residual":
        """After the layer; the states of its sequences advance in place (`Mixer.serve`)."""
        x = self.mixer_norm.later(*given)
        h: Any = x if self.mixer.late else x.tensor
        y = self.mixer.serve(h, tables, batch)
        if self.mlp is None or self.mlp_norm is None:
            return Residual(x.whole, y)
        x = self.mlp_norm.later(x.whole, y)
        y = self.mlp(x)
        return Residual(x.whole, y)

    def _channels(self, x: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.mlp(self.mlp_norm(x))


class Residual(NamedTuple):
    """Between two layers, while serving: x + more, [T D] each. The next layer's norm adds them, where it is compiled in its own kernel."""

    x: Tensor
    more: Tensor | None = None  # only before the first layer

    def whole(self) -> Tensor:
        return added(self.x, self.more)

    def of(self, rows: Tensor) -> "Residual":
        return Residual(self.x[rows], None if self.more is None else self.more[rows])


class NeedleworkPreTrainedModel(Installed, PreTrainedModel):
    """What both models share with transformers: names, initialisation, loading."""

    config: NeedleworkConfig  # pyrefly: ignore[bad-override-mutable-attribute] (as every model of transformers does)
    config_class = NeedleworkConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers takes no tuple)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # generate() then refuses assisted decoding and prompt lookup itself

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """PyTorch's convention: a module with tensors of its own starts in reset_parameters, then the config's choices."""
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        loaded = {name: p.clone() for name, p in own.items() if getattr(p, "_is_hf_initialized", False)}
        if not own or len(loaded) == len(own):
            return
        module.reset_parameters()  # pyrefly: ignore[not-callable] (torch types every attribute as a tensor or a module)
        std = self.config.initializer_range
        if type(module) in (nn.Linear, nn.Embedding, OutProjection, Projection) and std is not None:
            nn.init.normal_(own["weight"], std=std)
            if "bias" in own:
                nn.init.zeros_(own["bias"])
        if self.config.zero_output and (isinstance(module, OutProjection) or module is self.get_output_embeddings()):
            for tensor in own.values():
                nn.init.zeros_(tensor)
        if self.config.scaled_output and isinstance(module, OutProjection):
            own["weight"].div_(len(self.config.layout) ** 0.5)
        for name, value in loaded.items():  # from_pretrained has filled these already
            own[name].copy_(value)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """As everywhere in transformers, a pair with `output_loading_info`; ValueError for a `device_map` that does not keep every weight on a device."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if getattr(model, "hf_device_map", None) and any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                f"device_map: {model.hf_device_map} offloads weights, which are brought back for a module's forward; a needlework "
                "layer reads several modules' weights at once. Expected devices that hold the whole model"
            )
        return loaded

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() makes no DynamicCache: forward makes a NeedleworkCache


class NeedleworkModel(NeedleworkPreTrainedModel):
    """Embedding, blocks, final norm: input_ids [B T] -> last_hidden_state [B T D].

    Raises ValueError for a config without layers.

    >>> import torch
    >>> from needlework.layers import QDelta, Recurrent
    >>> from needlework.models import NeedleworkConfig, NeedleworkModel
    >>> mixers = {"Q": Recurrent(heads=4, key_dim=16, value_dim=16, write=QDelta())}
    >>> model = NeedleworkModel(NeedleworkConfig(vocab_size=257, hidden_size=64, layout="QQ", mixers=mixers))
    >>> model(torch.randint(257, (2, 100))).last_hidden_state.shape
    torch.Size([2, 100, 64])
    """

    def __init__(self, config: NeedleworkConfig):
        super().__init__(config)
        if not config.layout:
            raise ValueError("layout is empty: a model needs at least one layer, e.g. layout='RA'")
        self.embed: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, letter, i) for i, letter in enumerate(config.layout))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: NeedleworkCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: Tensor | None = None,
        state_passing: StatePassing | None = None,
        objective: Objective | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> NeedleworkOutput:
        """Hidden states of tokens, and the cache after them.

        input_ids [B T], or inputs_embeds [B T D].
        attention_mask [B ..T]: zeros at pads. cu_seqlens [N+1]: packs documents along T, with B = 1.
        past_key_values: a NeedleworkCache; with use_cache=True one is made where none is given.
        position_ids, seq_idx, cu_seq_lens_q: transformers' ways to say cu_seqlens (`packing.py`); positions are counted here.
        state_passing: the tokens are a segment of a sequence whose other segments are on other ranks, without cache, pads or packing.
        objective: the terms that every block adds to the loss, for training; of the tokens of this call alone.
        output_hidden_states: the embeddings, then each block's output, the last of them normed, all [B T D] and 0 at pads.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if x.dim() != 3:
            raise ValueError(f"input_ids: got shape {list(x.shape[:-1])}, expected [B, T], and inputs_embeds [B, T, D]")
        B, T = x.shape[:2]
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and state_passing is None
        if past_key_values is not None and not isinstance(past_key_values, NeedleworkCache):
            raise TypeError(f"past_key_values: got {type(past_key_values).__name__}, expected NeedleworkCache")
        if output_attentions:
            raise ValueError("output_attentions: a recurrent layer has no attention weights, and no layer here gives any")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (
            objective is not None
            and objective.distractor is not None
            and (past_key_values is not None or state_passing is not None)
        ):
            raise ValueError(
                "objective: a distractor needs whole sequences, not the part after a cache or on one of several ranks"
            )
        if past_key_values is None and use_cache:
            past_key_values = NeedleworkCache(self.config)
        real = None
        if attention_mask is not None and T:
            if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
                raise ValueError(f"attention_mask: expected [B, at least T] = [{B}, {T}], got {list(attention_mask.shape)}")
            real = attention_mask[:, -T:].bool()
            if real.all():
                real = None
        if cu_seqlens is None:
            cu_seqlens = documents(x, real, position_ids, seq_idx, cu_seq_lens_q)
        if real is not None and cu_seqlens is not None:
            raise ValueError("attention_mask with pads and packed documents are two ways to say one thing: give one")
        if state_passing is not None and (
            use_cache or past_key_values is not None or cu_seqlens is not None or attention_mask is not None
        ):
            raise ValueError(
                "state_passing: a sequence split over ranks takes no cache, no attention_mask and no packed documents"
            )
        if real is not None:  # padding is packing: a pad is outside every document
            counts = real.sum(1)
            cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            x = x[real][None]
        served = past_key_values if isinstance(past_key_values, TableCache) else None
        if served is not None and objective is not None:
            raise ValueError("objective: its terms need gradients, and a TableCache's states have none; expected no cache")
        if served is not None and real is None and cu_seqlens is not None:
            raise ValueError(
                "past_key_values: a TableCache has a row for each row of input_ids; packed documents need a NeedleworkCache"
            )
        spread = lambda x: (
            x.view(B, T, x.shape[-1]) if real is None else x.new_zeros(B, T, x.shape[-1]).masked_scatter(real[..., None], x)
        )
        if served is not None:
            states = [] if output_hidden_states else None
            x = spread(self._on_tables(served, x.flatten(0, 1), served.batch(B, T, real, x.device), states))
            hidden = None if states is None else (*map(spread, states), x)
            return NeedleworkOutput(last_hidden_state=x, past_key_values=past_key_values, hidden_states=hidden)
        terms, states = [], []
        for i, block in enumerate(self._blocks()):
            if output_hidden_states:
                states.append(spread(x))
            layer = None if past_key_values is None else past_key_values.layers[i]
            before = state_passing.receive(i, x) if state_passing is not None else None if layer is None else layer.state
            x, state, found = block(x, before, cu_seqlens, layer is not None or state_passing is not None, objective)
            terms.append(found)
            if layer is not None:
                layer.put(state, T)
            if state_passing is not None:
                x = state_passing.send(i, x, state)
        x = spread(self.norm(x))
        means = None if objective is None else objective.means(terms)
        hidden = (*states, x) if output_hidden_states else None
        return NeedleworkOutput(last_hidden_state=x, past_key_values=past_key_values, hidden_states=hidden, terms=means)

    def _on_tables(self, cache: TableCache, x: Tensor, batch: Batch, states: list[Tensor] | None) -> Tensor:
        """Normed hidden states of x [T D], new tokens of the cache's rows; states: gets what every block reads."""

        def step(x: Tensor, batch: Batch) -> Tensor:
            given = Residual(x)
            for block, layer in zip(self._blocks(), cache.layers, strict=True):
                if states is not None:
                    states.append(given.whole())
                given = block.serve(given, layer.tables(), batch)
            return self.norm(given.whole())

        return cache.advance(step, x, batch) if states is None else step(x, batch)

    def held(self) -> list[Held]:
        """What each layer holds of a sequence, in the model's dtype."""
        return [block.mixer.held(self.dtype) for block in self._blocks()]

    def _blocks(self) -> list[Block]:
        blocks: Any = self.blocks
        return list(blocks)

    @torch.no_grad()
    def through(
        self,
        x: Tensor,
        tables: Sequence[Mapping[str, Tensor]],
        batch: Batch,
        layer: Callable[[Block, Residual, Mapping[str, Tensor], Batch], Residual] = Block.serve,
    ) -> Residual:
        """What the last layer leaves of embeddings x [T D] of many sequences' new tokens; their states advance in place.

        tables: for each layer its tensors by the names of `held`. The caller owns them; nothing else is kept between calls.
        layer: Block.serve, or what has its results.
        """
        given = Residual(x)
        for block, own in zip(self._blocks(), tables, strict=True):
            given = layer(block, given, own, batch)
        return given

    @torch.no_grad()
    def serve(self, input_ids: Tensor, tables: Sequence[Mapping[str, Tensor]], batch: Batch) -> Tensor:
        """Normed hidden states [T D] of new tokens input_ids [T] (`through`)."""
        return self.norm(self.through(self.embed(input_ids), tables, batch).whole())


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
            head, cap = self.lm_head, self.config.softcap
            hidden = out.last_hidden_state.flatten(0, 1)
            nats = None
            if emphasis is None:
                loss = linear_cross_entropy(hidden, head.weight, head.bias, targets.flatten(), cap, impl=loss_impl)
            elif loss_impl != "torch":
                raise ValueError(f'loss_impl: got {loss_impl!r}, expected "torch" where targets have an emphasis')
            else:
                loss, nats = emphasised_cross_entropy(
                    hidden, head.weight, head.bias, targets.flatten(), emphasis.flatten(), cap
                )
                nats = nats.view(targets.shape)
            if objective is None:
                return Losses(loss, 1.0, None, {}, nats)
            parts = {name: mean.detach() for name, mean in out.terms.items()}
            return Losses(loss, objective.share, objective.auxiliary(out.terms), parts, nats)
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
