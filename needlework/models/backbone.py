"""The model without its unembedding: embedding, one Block a layer, final norm. The config builds the mixers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from needlework.layers.batch import Batch
from needlework.layers.norm import RMSNorm
from needlework.layers.objective import Objective
from needlework.layers.state import Held
from needlework.models.block import Block, Residual, StatePassing
from needlework.models.cache import NeedleworkCache
from needlework.models.config import NeedleworkConfig
from needlework.models.packing import Tokens, documents, real_tokens
from needlework.models.pretrained import NeedleworkPreTrainedModel
from needlework.models.results import NeedleworkOutput
from needlework.models.table_cache import TableCache


def check_objective(objective: Objective, cache: NeedleworkCache | None, state_passing: StatePassing | None) -> None:
    """ValueError for an objective whose terms a call cannot have."""
    if objective.distractor is not None and (cache is not None or state_passing is not None):
        raise ValueError("objective: a distractor needs whole sequences, not the part after a cache or on one of several ranks")
    if isinstance(cache, TableCache):
        raise ValueError("objective: its terms need gradients, and a TableCache's states have none; expected no cache")


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
        if objective is not None:
            check_objective(objective, past_key_values, state_passing)
        if past_key_values is None and use_cache:
            past_key_values = NeedleworkCache(self.config)
        real = real_tokens(x, attention_mask)
        if cu_seqlens is None:
            cu_seqlens = documents(x, real, position_ids, seq_idx, cu_seq_lens_q)
        tokens = Tokens.of(x, real, cu_seqlens)
        given_documents = real is None and cu_seqlens is not None
        if state_passing is not None and (past_key_values is not None or given_documents or attention_mask is not None):
            raise ValueError(
                "state_passing: a sequence split over ranks takes no cache, no attention_mask and no packed documents"
            )
        given, spread = Residual(tokens.x), tokens.spread
        if isinstance(past_key_values, TableCache):
            if given_documents:
                raise ValueError(
                    "past_key_values: a TableCache has a row for each row of input_ids; packed documents need a NeedleworkCache"
                )
            batch, states = past_key_values.batch(B, T, real, x.device), [] if output_hidden_states else None
            x = spread(self._on_tables(past_key_values, tokens.x.flatten(0, 1), batch, states))
            hidden = None if states is None else (*map(spread, states), x)
            return NeedleworkOutput(last_hidden_state=x, past_key_values=past_key_values, hidden_states=hidden)
        terms, states = [], []
        for i, block in enumerate(self._blocks()):
            if output_hidden_states:
                states.append(spread(given.whole()))
            layer = None if past_key_values is None else past_key_values.layers[i]
            before = state_passing.receive(i, given.x) if state_passing is not None else None if layer is None else layer.state
            carried = layer is not None or state_passing is not None
            x, more, state, found = block(*given, before, tokens.cu_seqlens, carried, objective)
            terms.append(found)
            if layer is not None:
                layer.put(state, T)
            if state_passing is not None:
                x = state_passing.send(i, x, state)
            given = Residual(x, more)
            if self.gradient_checkpointing and self.training:
                given = Residual(given.whole())  # what a block is given is kept to run it again: a sum is half of its summands
        x = spread(self.norm(*given))
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
            return self.norm(*given)

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
        return self.norm(*self.through(self.embed(input_ids), tables, batch))
