"""Any causal language model of transformers, from a folder or the Hugging Face Hub."""

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_causal(source: str) -> PreTrainedModel:
    """The model, in evaluation mode and in the dtype that its weights have. source: a folder, or a name on the Hub.

    ValueError, with transformers' reason, where there is no such model, or where it needs code of its own.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{source}: AutoModelForCausalLM loads no model from there: {error}") from None


def absolute_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model has a learned vector for: beyond them it cannot read. None if it has no such table.

    The table is an Embedding beside that of the tokens, as long as the config says a text may be (OPT's has two rows more).
    """
    tables = {
        m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()
    }
    stated = (getattr(model.config, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((n for n in stated if isinstance(n, int) and tables & {n, n + 2}), None)
