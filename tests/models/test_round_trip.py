"""What is loaded is what was saved: every catalogue entry and every preset in small, where freed memory holds NaN."""

import pytest
import torch

from needlework.experiment.pretrained import load_model
from needlework.layers import CCQ, Attention, Carve, Delta, Differential, Memory, Polar, Recurrent, RetentionGate, Rope, SwiGLU
from needlework.layers.catalog import CATALOG, Sizes
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.models.presets import PRESETS, preset
from needlework.testing.compare import poisoned

SIZES = Sizes(heads=2, key_dim=8, value_dim=8, attention_heads=4, kv_heads=2, head_dim=8, content_chunk=4)
NARROW = {"heads": 2, "kv_heads": 1, "key_dim": 8, "value_dim": 8, "head_dim": 8, "content_chunk": 4, "window": 5, "hidden": 24}
BLIND = {
    "carve, blind": Recurrent(heads=2, key_dim=8, value_dim=8, write=Carve(rank=0, content_chunk=4)),
    "carve, blind, with ccq": Recurrent(heads=2, key_dim=8, value_dim=8, write=Carve(rank=0, content_chunk=4), read=CCQ()),
    "retention, spread": Attention(
        heads=2, head_dim=8, attend=Polar(), memory=Memory(write=Delta(gate=RetentionGate(half_life=(32.0, 8192.0))))
    ),
    "differential, rope": Attention(heads=2, head_dim=8, attend=Differential(), position=Rope()),
}
MIXERS = {name: mixer.make(SIZES) for name, mixer in CATALOG.items()} | BLIND


def narrow(value):
    """A component's dict with every size, a number, small; what it composes, and a rank of 0, stay."""
    if not isinstance(value, dict):
        return value
    small = NARROW | {"rank": min(value.get("rank") or 0, 2)}
    return {k: small[k] if k in small and isinstance(v, int) else narrow(v) for k, v in value.items()}


def in_small(config: NeedleworkConfig) -> NeedleworkConfig:
    letters = "".join(dict.fromkeys(config.layout)) * 2
    parts = {"mixers": narrow(config.mixers), "mlp": narrow(config.mlp)}
    return config.replaced(vocab_size=31, hidden_size=16, layout=letters, **parts)


CONFIGS = {
    name: NeedleworkConfig(vocab_size=31, hidden_size=16, layout="MM", mixers={"M": mixer}, mlp=SwiGLU(hidden=24))
    for name, mixer in MIXERS.items()
} | {name: in_small(preset(name)) for name in PRESETS}


def logits(model: NeedleworkForCausalLM) -> torch.Tensor:
    ids = torch.randint(1, 31, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


@pytest.fixture(params=CONFIGS)
def saved(request, tmp_path):
    """A model away from its start, where a branch could hide at zero; built in memory that held NaN."""
    torch.manual_seed(0)
    with poisoned():
        model = NeedleworkForCausalLM(CONFIGS[request.param])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_a_model_gives_the_same_logits_when_it_is_loaded_and_when_a_run_starts_from_it(saved):
    model, path = saved
    expected = logits(model)
    assert expected.isfinite().all()
    with poisoned():
        loaded = NeedleworkForCausalLM.from_pretrained(path)
        start = load_model(path, model.config)
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(logits(start), expected)


def test_every_tensor_of_a_loaded_model_is_in_its_file_or_made_by_its_module(saved):
    model, path = saved
    with poisoned():
        loaded = NeedleworkForCausalLM.from_pretrained(path)
    held = lambda module: dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in held(model).items():
        assert torch.equal(held(loaded)[name], tensor), name


@pytest.mark.parametrize("lacks", [("erase_bias",), ("A_log",), ("erase_bias", "w2")], ids="-".join)
def test_what_a_file_lacks_starts_as_the_module_starts_it(tmp_path, lacks):
    """A buffer as well as a parameter; what the file has beside them is kept, a buffer too."""
    model = NeedleworkForCausalLM(CONFIGS["carve"])
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1.0)
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith(lacks)}
    model.save_pretrained(tmp_path, state_dict=dict(weights))
    with poisoned():
        loaded = NeedleworkForCausalLM.from_pretrained(tmp_path)
    fresh = NeedleworkForCausalLM(CONFIGS["carve"]).state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights[name] if name in weights else fresh[name]), name
