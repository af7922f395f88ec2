"""needlework's models inside vLLM: the plugin that vLLM finds by the entry point `vllm.general_plugins`. docs/serving.md has the rest.

vLLM is imported only when it calls `register`. What is written against its classes is in `vllm_model.py` and `vllm_layers.py`, which vLLM
alone imports; how layers' states lie in its caches is `bins.py`, which knows nothing of vLLM's classes.
"""

from torch import Tensor, nn

from needlework.models.config import NeedleworkConfig

# The one whose classes vllm_model.py was written against: the shapes of its caches change between minor versions.
VERSION = "0.32.0"
ARCHITECTURE = "NeedleworkForCausalLM"


def register() -> None:
    """Makes vLLM know needlework's models. vLLM calls it in each of its processes, whatever model it serves."""
    import vllm
    from vllm import ModelRegistry

    import needlework.models  # transformers' AutoConfig then knows them  # noqa: F401

    if vllm.__version__.split("+")[0] != VERSION:
        ModelRegistry.register_model(ARCHITECTURE, OtherVersion)
        return
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from needlework.serve.vllm_model import Described

    MODEL_ARCH_CONFIG_CONVERTORS[NeedleworkConfig.model_type] = Described
    ModelRegistry.register_model(ARCHITECTURE, "needlework.serve.vllm_model:NeedleworkVllm")


class OtherVersion(nn.Module):
    """What another version of vLLM gets for our models: it raises where one is made. Other models are served as before."""

    def __init__(self, *, vllm_config: object, prefix: str = ""):
        import vllm

        raise ImportError(f"needlework serves inside vLLM {VERSION}, and this is {vllm.__version__}: install vllm=={VERSION}")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError
