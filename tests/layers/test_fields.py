"""Every number, choice and part of a component's config is checked when the config is made, and the error names the field."""

import dataclasses
import math
import re

import numpy as np
import pytest

from needlework.layers import (
    CCQ,
    KINDS,
    Alibi,
    Attention,
    Canon,
    Carve,
    ChannelGate,
    Comba,
    Delta,
    DeltaProduct,
    Differential,
    Fox,
    GatedConv,
    GatedNorm,
    Gdn2,
    HalfRope,
    HeadNorm,
    Hedgehog,
    Linear,
    Llama3Rope,
    LowRankGate,
    Lucid,
    LucidPath,
    Mamba,
    Mamba3,
    Memory,
    Objective,
    OutputGate,
    PairRope,
    Path,
    Polar,
    QDelta,
    Recurrent,
    RetentionGate,
    Rope,
    Rwkv7,
    ScalarGate,
    ShortConv,
    Softmax,
    SquaredReLU,
    SSMax,
    SwiGLU,
    from_dict,
)

RECURRENT = {"heads": 2, "key_dim": 8, "value_dim": 8, "write": Linear()}
MAMBA3 = {"heads": 2, "key_dim": 8, "value_dim": 8}
ATTENTION = {"heads": 2, "head_dim": 8, "attend": Softmax()}
NOT_A_NUMBER = ("x", math.nan, math.inf, True, [1])
COUNT = (0, -1, 2.5, *NOT_A_NUMBER)
ABOVE_ZERO = (0, -0.5, *NOT_A_NUMBER)
HALF_LIVES = (None, 0.5, 100, (32.0, 8192.0), [32, 64])
# (config, field): what is needed beside it, what it may be, what it may not
NUMBERS = {
    (Recurrent, "heads"): (RECURRENT, (1, 6), COUNT),
    (Recurrent, "key_dim"): (RECURRENT, (1, 128), COUNT),
    (Recurrent, "value_dim"): (RECURRENT, (1, 128), COUNT),
    (Recurrent, "value_heads"): (RECURRENT, (None, 4), COUNT),
    (Attention, "heads"): (ATTENTION, (1, 8), COUNT),
    (Attention, "head_dim"): (ATTENTION, (1, 64), COUNT),
    (Attention, "kv_heads"): (ATTENTION, (None, 1), COUNT),
    (Mamba3, "heads"): (MAMBA3, (1, 6), COUNT),
    (Mamba3, "key_dim"): (MAMBA3, (2, 128), COUNT),
    (Mamba3, "value_dim"): (MAMBA3, (1, 64), COUNT),
    (Mamba3, "groups"): (MAMBA3, (1, 2), COUNT),
    (Mamba3, "rank"): (MAMBA3, (1, 4), COUNT),
    (Mamba3, "half_life"): (MAMBA3, (None, 0.5, 100), ABOVE_ZERO),
    (GatedConv, "width"): ({}, (2, 4), (1, *COUNT)),
    (GatedConv, "channels"): ({}, (None, 1), COUNT),
    (Mamba, "channels"): ({}, (None, 1), COUNT),
    (Mamba, "state"): ({}, (1, 16), COUNT),
    (Mamba, "rank"): ({}, (None, 1), COUNT),
    (Mamba, "width"): ({}, (2, 4), (1, *COUNT)),
    (ShortConv, "width"): ({}, (2, 4), (1, *COUNT)),
    (Canon, "width"): ({}, (2, 4), (1, *COUNT)),
    (Softmax, "window"): ({}, (None, 1), COUNT),
    (Softmax, "scale"): ({}, (None, 0.1, 1), ABOVE_ZERO),
    **{(kind, "window"): ({}, (None, 1), COUNT) for kind in (SSMax, Alibi, Fox)},
    **{(kind, "scale"): ({}, (None, 0.1, 1), ABOVE_ZERO) for kind in (SSMax, Alibi, Fox)},
    (SSMax, "start"): ({}, (0.1, 1), ABOVE_ZERO),
    (Lucid, "window"): ({}, (None, 1), COUNT),
    (Lucid, "scale"): ({}, (None, 0.1, 1), ABOVE_ZERO),
    (LucidPath, "rank"): ({}, (None, 1), COUNT),
    (LucidPath, "conv"): ({}, (None, 2, 3), (1, *COUNT)),
    (LucidPath, "window"): ({}, (None, 1), COUNT),
    (LucidPath, "scale"): ({}, (None, 0.1, 1), ABOVE_ZERO),
    (Path, "rank"): ({}, (None, 1), COUNT),
    (Path, "conv"): ({}, (None, 2, 3), (1, *COUNT)),
    (Path, "window"): ({}, (None, 1), COUNT),
    (Path, "scale"): ({}, (None, 0.1, 1), ABOVE_ZERO),
    (Polar, "window"): ({}, (None, 1), COUNT),
    (Differential, "window"): ({}, (None, 1), COUNT),
    (Differential, "start"): ({}, (None, 0, 0.8), (-0.1, 1, *NOT_A_NUMBER)),
    (Rope, "base"): ({}, (0.5, 10_000), ABOVE_ZERO),
    (HalfRope, "base"): ({}, (0.5, 10_000), ABOVE_ZERO),
    (Llama3Rope, "base"): ({}, (0.5, 10_000), ABOVE_ZERO),
    (Llama3Rope, "factor"): ({}, (0.5, 32), ABOVE_ZERO),
    (Llama3Rope, "low"): ({}, (0.5, 1), ABOVE_ZERO),
    (Llama3Rope, "high"): ({}, (1.5, 4), (1, *ABOVE_ZERO)),
    (Llama3Rope, "length"): ({}, (1, 8192), COUNT),
    (PairRope, "base"): ({}, (0.5, 10_000), ABOVE_ZERO),
    (GatedNorm, "eps"): ({}, (1e-5, 1), ABOVE_ZERO),
    (OutputGate, "rank"): ({}, (None, 1), COUNT),
    (ScalarGate, "half_life"): ({}, HALF_LIVES, (*ABOVE_ZERO, (32.0, 0.0))),
    (ChannelGate, "half_life"): ({}, HALF_LIVES, (*ABOVE_ZERO, (32.0,))),
    (RetentionGate, "half_life"): ({}, HALF_LIVES, (*ABOVE_ZERO, (1.0, 2.0, 3.0))),
    (ChannelGate, "rank"): ({}, (None, 1), COUNT),
    (LowRankGate, "rank"): ({}, (1, 16), COUNT),
    (LowRankGate, "temperature"): ({}, (0.5, 16), ABOVE_ZERO),
    (RetentionGate, "offset"): ({}, (-3.9, 0, 4), NOT_A_NUMBER),
    (RetentionGate, "bound"): ({}, (None, 35, (35.0, None)), (0, -1, math.nan, (35.0, 0.0), (35.0, "x"), "x", True)),
    (Carve, "rank"): ({}, (0, 16), (-1, 2.5, *NOT_A_NUMBER)),
    (Carve, "content_chunk"): ({}, (1, 64), COUNT),
    (Carve, "write_rank"): ({}, (1, 2), COUNT),
    (Carve, "half_life"): ({}, ((32.0, 64.0), [32, 64]), ((0.0, 64.0), (32.0, -1.0), (32.0,), (1.0, 2.0, 3.0), 32.0, "ab")),
    (DeltaProduct, "write_rank"): ({}, (1, 2), COUNT),
    (Rwkv7, "rank"): ({}, (None, 1), COUNT),
    (CCQ, "factor"): ({}, (None, 0, 0.5, 1), (-0.1, 1.5, *NOT_A_NUMBER)),
    (QDelta, "factor"): ({}, (None, 0, 0.5, 1), (-0.1, 1.5, *NOT_A_NUMBER)),
    (CCQ, "start"): ({}, (0.01, 0.99), (0, 1, -0.1, *NOT_A_NUMBER)),
    (QDelta, "lam"): ({}, (None, 0, 0.5, 1), (-0.1, 1.5, *NOT_A_NUMBER)),
    (SwiGLU, "hidden"): ({}, (1, 64), COUNT),
    (SquaredReLU, "hidden"): ({}, (1, 64), COUNT),
    (Objective, "regulariser_weight"): ({}, (0, 0.5), (-0.1, 1, *NOT_A_NUMBER)),
    (Objective, "distractor_weight"): ({}, (0, 2), (-0.1, *NOT_A_NUMBER)),
    (Objective, "summed_over"): ({}, (None, 8192), COUNT),
}
# the same for what is no number
OTHERS = {
    (Lucid, "precondition"): ({}, ("key", "qk", "rowmax", "beta"), ("keys", None, 1)),
    (Lucid, "solve"): ({}, ("window", "global"), ("all", None)),
    (Carve, "prediction"): ({}, ("previous", "decayed"), ("next", None)),
    (QDelta, "coupling"): ({}, ("recurrent", "transposed"), ("none", None)),
    (Recurrent, "write"): (RECURRENT, (Delta(), Carve()), (Softmax(), ScalarGate(), None, "delta")),
    (Recurrent, "read"): (RECURRENT, (CCQ(),), (Delta(), None)),
    (Recurrent, "conv"): (RECURRENT, (None, Canon()), (Rope(), "short_conv", 4)),
    (Recurrent, "output_gate"): (RECURRENT, (True, False, OutputGate()), (1, None, "yes")),
    (Attention, "qk_norm"): (ATTENTION, (True, False, "weighted"), (1, None, "yes")),
    (Recurrent, "position"): (RECURRENT, (None, Rope()), (Canon(), "rope")),
    (Recurrent, "norm"): (RECURRENT, (GatedNorm(), HeadNorm(weight=False)), (None, Rope())),
    (Linear, "features"): ({}, (None, Hedgehog()), (ScalarGate(), "hedgehog")),
    (Hedgehog, "map"): ({}, ("halves", "joint"), ("both", None)),
    (Hedgehog, "heads"): ({}, ("own", "shared"), ("all", 4)),
    (OutputGate, "activation"): ({}, ("silu", "sigmoid"), ("relu", None)),
    (Attention, "attend"): (ATTENTION, (Lucid(),), (Delta(), None)),
    (Attention, "position"): (ATTENTION, (None, Rope()), (Canon(), "rope")),
    (Attention, "conv"): (ATTENTION, (None, ShortConv()), (Rope(),)),
    (Attention, "memory"): (ATTENTION, (None, Memory()), (Delta(), True)),
    (Mamba3, "pairs"): (MAMBA3, ("even", "halves"), ("odd", None)),
    (Mamba3, "turning"): (MAMBA3, ("half", "all"), ("none", 0.5)),
    (Mamba3, "decay"): (MAMBA3, ("softplus", "rational"), ("exp", None)),
    (Mamba3, "output_norm"): (MAMBA3, (True, False), (1, None, "yes")),
    (Memory, "write"): ({}, (QDelta(),), (CCQ(), None)),
    (Memory, "read"): ({}, (CCQ(),), (QDelta(), None)),
    (Delta, "gate"): ({}, (None, ChannelGate()), (Delta(), 0.5)),
    (Delta, "allow_neg_eigval"): ({}, (True, False), (1, None)),
    (Gdn2, "allow_neg_eigval"): ({}, (True, False), (1, None)),
    (DeltaProduct, "gate"): ({}, (None, ScalarGate()), (Delta(),)),
    (Comba, "gate"): ({}, (ChannelGate(),), (None, Rope())),
    (Gdn2, "gate"): ({}, (ScalarGate(),), (None, Rope())),
}  # fmt: skip
ROWS = [pytest.param(*key, *row, id=f"{key[0].kind}.{key[1]}") for key, row in (NUMBERS | OTHERS).items()]


@pytest.mark.parametrize("kind, name, beside, good, bad", ROWS)
def test_a_field_out_of_its_range_is_refused_by_name(kind, name, beside, good, bad):
    for value in good:
        made = kind(**beside | {name: value})
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)
        assert from_dict(made.to_dict()) == made
    for value in bad:
        with pytest.raises(ValueError, match=rf"^{kind.kind}: {name} is .*, expected ") as error:
            kind(**beside | {name: value})
        assert repr(value) in str(error.value)


def test_llama_3s_fast_frequencies_begin_above_its_slow_ones():
    with pytest.raises(ValueError, match=r"llama3_rope: high is 1\.0, expected a number above low = 1\.0"):
        Llama3Rope(low=1, high=1)


def test_every_number_of_every_config_has_its_row():
    def has_numbers(annotation):
        return re.search(r"\b(int|float)\b", str(annotation)) is not None

    numbers = {
        (kind, field.name)
        for kind in KINDS
        for field in dataclasses.fields(kind)
        if has_numbers(kind.__annotations__[field.name])
    }
    assert numbers == set(NUMBERS)


def test_a_whole_number_is_a_number_and_numpys_are_too():
    rope = Rope(base=500_000)
    assert rope == Rope(base=500_000.0) and isinstance(rope.base, float)
    mlp = SwiGLU(hidden=np.int64(64))
    assert type(mlp.hidden) is int and mlp.to_dict()["hidden"] == 64
    assert type(LowRankGate(temperature=np.float32(16)).temperature) is float


def test_a_doubled_lambda_may_be_two():
    assert QDelta(lam=2.0, allow_neg_eigval=True).lam == 2.0
    with pytest.raises(ValueError, match=r"qdelta: lam is 2.1, expected a number in \[0, 2"):
        QDelta(lam=2.1, allow_neg_eigval=True)


def test_a_missing_field_of_a_file_is_named():
    with pytest.raises(ValueError, match="recurrent: key_dim, write is missing"):
        from_dict({"kind": "recurrent", "heads": 2, "value_dim": 8})
