"""What `attn_implementation="lucid"` serves: architectures, attention modules and keywords; all else is refused before it computes.

An attention function cannot see what an architecture keeps outside it (ALiBi, two value maps, a cache of latents), and transformers
hands it any keyword. So the architectures are listed, and tests/models/test_lucid_architectures.py holds each of them to the definition.
"""

import functools

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

NAME = "attn_implementation='lucid'"

# model_type -> transformers' package and the attention class in it
ARCHITECTURES = {
    "cohere": ("cohere", "CohereAttention"),
    "cohere2": ("cohere2", "Cohere2Attention"),
    "gemma": ("gemma", "GemmaAttention"),
    "gemma3_text": ("gemma3", "Gemma3Attention"),
    "glm4": ("glm4", "Glm4Attention"),
    "gpt_neox": ("gpt_neox", "GPTNeoXAttention"),
    "granite": ("granite", "GraniteAttention"),
    "llama": ("llama", "LlamaAttention"),
    "mistral": ("mistral", "MistralAttention"),
    "mixtral": ("mixtral", "MixtralAttention"),
    "olmo2": ("olmo2", "Olmo2Attention"),
    "olmo3": ("olmo3", "Olmo3Attention"),
    "phi3": ("phi3", "Phi3Attention"),
    "qwen2": ("qwen2", "Qwen2Attention"),
    "qwen3": ("qwen3", "Qwen3Attention"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeAttention"),
    "smollm3": ("smollm3", "SmolLM3Attention"),
    "stablelm": ("stablelm", "StableLmAttention"),
    "starcoder2": ("starcoder2", "Starcoder2Attention"),
}

# keywords that change nothing here: the mask shows positions and windows, the rest is for the loss and the outputs of layers
HARMLESS = (
    "position_ids", "sliding_window", "use_cache", "output_hidden_states", "output_router_logits",
    "num_items_in_batch", "ignore_index", "shift_labels",
)  # fmt: skip
# keywords that must not ask for anything
VALUES = {"is_causal": (None, True), "output_attentions": (None, False)}


def check_architecture(config: PreTrainedConfig) -> None:
    """NotImplementedError for a model_type that is not listed."""
    if config.model_type not in ARCHITECTURES:
        raise NotImplementedError(
            f"{NAME} does not serve the architecture {config.model_type!r} ({type(config).__name__}); "
            f"it serves {', '.join(ARCHITECTURES)}"
        )


@torch.compiler.assume_constant_result  # torch.compile does not read a function's name
def _forward_of(kind: type[nn.Module]) -> str:
    """Where the forward is written that instances of `kind` run: wrappers such as FSDP subclass and leave it."""
    return f"{kind.forward.__module__}.{kind.forward.__qualname__}"


def config_of(module: nn.Module) -> PreTrainedConfig:
    """The config that an attention module of transformers keeps."""
    return module.config  # pyrefly: ignore[bad-return] (torch types every attribute of a module as a tensor or a module)


def check_module(module: nn.Module) -> None:
    """NotImplementedError for a module whose forward is not that of a listed architecture, or that is not causal."""
    config = config_of(module)
    check_architecture(config)
    package, name = ARCHITECTURES[config.model_type]
    found, expected = _forward_of(type(module)), f"transformers.models.{package}.modeling_{package}.{name}.forward"
    if found != expected:
        raise NotImplementedError(f"{NAME} on {config.model_type!r}: attention by {found}, expected {expected}")
    if not module.is_causal:
        raise NotImplementedError(f"{NAME}: {type(module).__name__} is not causal, and the solve is")


def check_keywords(module: nn.Module, keywords: dict) -> None:
    """TypeError for a keyword that is not known, ValueError for a known one that asks for what is not done here."""
    for name, value in keywords.items():
        if name in VALUES:
            if value not in VALUES[name]:
                raise ValueError(f"{NAME}: {type(module).__name__} passes {name}={value}, expected one of {VALUES[name]}")
        elif name not in HARMLESS:
            raise TypeError(
                f"{NAME}: {type(module).__name__} passes the keyword {name!r}, which is not implemented; "
                f"known are {', '.join((*HARMLESS, *VALUES))}"
            )


def refuse_others() -> None:
    """Make transformers check the architecture where a model is built and where its attention is set.

    There is no hook before a constructor that looks "lucid" up in a table of its own (GPT-J, Falcon: KeyError), and no error from
    models whose attention cannot be set (BLOOM: a warning). Both methods are transformers' own and public, and do as before for
    every other name.
    """
    correct, set_ = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation

    @functools.wraps(correct)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        if requested_attention == "lucid":
            check_architecture(self.config)
        return correct(self, requested_attention, *args, **kwargs)

    @functools.wraps(set_)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        own = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        if own == "lucid":
            check_architecture(self.config)
        return set_(self, attn_implementation, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation
