"""What CARVE's entry points accept: sizes, dtypes, defaults. The values of cu_seqlens and position are data, checked apart."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from needlework.ops.carve.state import CarveState, empty_state
from needlework.ops.common.packing import sequences
from needlework.ops.common.remembered import remember, remembered
from needlework.ops.common.shapes import behind, check, check_count, check_dtypes, check_state, check_tensor, width

Prediction = Literal["previous", "decayed"]
RANKS = (1, 2, 4)


class CarveInputs(NamedTuple):
    """The op's tensors: of the tokens, then the layer's own. Their gradients come back as `CarveInputs` too."""

    q: Tensor  # [B T H K]
    k: Tensor  # [B T H R K], or without R
    v: Tensor  # [B T H R V], or without R
    f: Tensor  # [B T H K]
    b: Tensor  # [B T H K]
    w: Tensor  # [B T H]
    A_log: Tensor  # [H K]
    dt_bias: Tensor  # [H K]
    w1: Tensor  # [r V]
    w2: Tensor  # [K r]

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self[:6]

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self[6:]

    def widened(self, K: int, V: int) -> "CarveInputs":
        """With zeros behind the numbers of each head, which hold, read and write nothing."""
        q, k, f, b, A_log, dt_bias = (behind(x, K) for x in (self.q, self.k, self.f, self.b, self.A_log, self.dt_bias))
        return CarveInputs(q, k, behind(self.v, V), f, b, self.w, A_log, dt_bias, behind(self.w1, V), behind(self.w2.mT, K).mT)


class Settings(NamedTuple):
    """The paper's own settings, as every form of the op takes them."""

    content_chunk: int
    prediction: Prediction
    scale: float


def checked(
    tensors: CarveInputs,
    b_bias: Tensor | None,
    content_chunk: int,
    prediction: Prediction,
    scale: float | None,
    initial_state: CarveState | None,
    cu_seqlens: Tensor | None,
    table: CarveState | None = None,
) -> tuple[CarveInputs, Settings]:
    """q … w2 with the R axis in k and v, and settings with a scale; ValueError for what does not fit.

    table: the state is one, of any number of slots.
    """
    q, k, v, f, b, w = tensors.tokens
    A_log, dt_bias, w1, w2 = tensors.parameters
    check_dtypes(q=q, k=k, v=v)
    check("q", q, "B T H K")
    check_tensor("k", k, "B T H K")
    B, T, H, K = q.shape
    ranked = k.dim() == 5
    token = {"B": B, "T": T, "H": H}
    check("k", k, "B T H R K" if ranked else "B T H K", **token, K=K)
    check("v", v, "B T H R V" if ranked else "B T H V", **token, **({"R": k.shape[3]} if ranked else {}))
    if ranked and k.shape[3] not in RANKS:
        raise ValueError(f"k: axis 3 (R) of [B T H R K] has size {k.shape[3]}, expected 1, 2 or 4")
    check("f", f, "B T H K", **token, K=K)
    check("b", b, "B T H K", **token, K=K)
    check("w", w, "B T H", **token)
    check("A_log", A_log, "H K", H=H, K=K)
    check("dt_bias", dt_bias, "H K", H=H, K=K)
    if b_bias is not None:
        check("b_bias", b_bias, "H K", H=H, K=K)
    V = v.shape[-1]
    check("w1", w1, "r V", V=V)
    check("w2", w2, "K r", K=K, r=w1.shape[0])
    check_count("content_chunk", content_chunk)
    if prediction not in get_args(Prediction):
        raise ValueError(f"prediction: got {prediction!r}, expected 'previous' or 'decayed'")

    name, state = ("initial_state", initial_state) if table is None else ("state", table)
    N = sequences(cu_seqlens, B)
    if state is not None:
        check_state(name, state, CarveState)
        N = N if table is None else len(state.S)
        check(f"{name}.S", state.S, "N H K V", N=N, H=H, K=K, V=V)
        check(f"{name}.m", state.m, "N H V", N=N, H=H, V=V)
        check(f"{name}.total", state.total, "N H V", N=N, H=H, V=V)
        check(f"{name}.position", state.position, "N", N=N)
    if not ranked:
        k, v = k.unsqueeze(3), v.unsqueeze(3)
    settings = Settings(content_chunk, prediction, K**-0.5 if scale is None else scale)
    return tensors._replace(k=k, v=v), settings


def begun(state: CarveState | None, tensors: CarveInputs, cu_seqlens: Tensor | None) -> CarveState:
    """`state`, or that of sequences that have seen nothing."""
    if state is not None:
        return state
    (B, _, H, K), V = tensors.q.shape, tensors.v.shape[-1]
    return empty_state(sequences(cu_seqlens, B), H, K, V, dtype=width(tensors.q), device=tensors.q.device)


def biased(tensors: CarveInputs, b_bias: Tensor | None) -> CarveInputs:
    """q, k, v, f, b, … with b + b_bias for b, in float32 or wider."""
    if b_bias is None:
        return tensors
    b = tensors.b
    return tensors._replace(b=b.to(width(b)) + b_bias.to(width(b)))


def check_position(position: Tensor, content_chunk: int) -> None:
    """Raise ValueError unless every position lies inside a content chunk: the state may come from another model. What was right stays so
    until it changes, for to read it has the host wait for the GPU."""
    remember(position)
    _check(position, content_chunk)


@remembered
def _check(position: Tensor, content_chunk: int) -> None:
    outside = (position < 0) | (position >= content_chunk)
    if outside.any():
        raise ValueError(
            f"initial_state.position: {int(position[outside][0])} is not inside a content chunk of content_chunk = {content_chunk} "
            "tokens; was the state made with another content_chunk?"
        )
