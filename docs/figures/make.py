"""The figures of docs/explanation/, as SVG files beside this script: `python docs/figures/make.py`. Every curve is computed by the
library."""

from pathlib import Path

import matplotlib
import torch
from torch.nn.functional import normalize

from needlework.ops.ccq import chunk_ccq
from needlework.ops.delta import chunk_delta
from needlework.ops.lucid import chunk_lucid
from needlework.ops.polar import chunk_polar
from needlework.ops.specs import OPS
from needlework.testing import cards

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"


def save(figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})
    plt.close(figure)


def one_recurrence() -> None:
    """How far a read lies from the value that was written, as pairs are written into a state of 64 × 64."""
    K, runs, counts = 64, 8, [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
    k = normalize(torch.randn(runs, max(counts), 1, K), dim=-1)
    v = torch.randn(runs, max(counts), 1, K)
    ones = torch.ones(runs, max(counts), 1)
    rules = {
        "linear attention": (GREY, None, None),
        "DeltaNet, β = 1": (BLUE, None, ones),
        "Gated DeltaNet, β = 1, half-life 64": (ORANGE, ones * torch.tensor(0.5).log() / 64, ones),
    }
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for name, (colour, g, beta) in rules.items():
        newest, every = [], []
        for n in counts:
            gates = [None if x is None else x[:, :n] for x in (g, beta)]
            state = chunk_delta(k[:, :n], k[:, :n], v[:, :n], *gates, output_final_state=True).state
            read = torch.einsum("bhkv,bthk->bthv", state, k[:, :n])
            miss = (read - v[:, :n]).norm(dim=-1) / v[:, :n].norm(dim=-1)
            newest.append(miss[:, -1].mean().item())
            every.append(miss.mean().item())
        for axis, curve in zip(axes, (newest, every), strict=True):
            axis.plot(counts, curve, color=colour, label=name)
    for axis, title in zip(axes, ("the newest pair", "all pairs, mean"), strict=True):
        axis.set(xscale="log", xlabel="pairs written", title=title)
    axes[0].set_ylabel("‖read − value‖ / ‖value‖")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "one_recurrence")


def ccq() -> None:
    """What is left of a query along a direction in which keys vary, and across it."""
    T, K = 512, 32
    along = normalize(torch.randn(K), dim=0)
    figure, axis = plt.subplots(figsize=(4.6, 3))
    strengths = torch.linspace(0, 1, 21)
    for spread, colour in ((0.0, GREY), (1.0, GREEN), (4.0, BLUE)):
        k = normalize(torch.randn(1, T, 1, K) + spread * torch.randn(1, T, 1, 1) * along * K**0.5, dim=-1)
        q = along.expand(1, T, 1, K).contiguous()
        kept = [chunk_ccq(q, k, torch.full((1, T, 1), eta.item())).q[0, -1, 0].norm().item() for eta in strengths]
        axis.plot(strengths, kept, color=colour, label=f"keys vary along it {1 + spread**2 * K:.0f} × as much")
    axis.set(xlabel="λ", ylabel="‖(I − λΣ) p‖, p the direction", ylim=(0, 1.05))
    axis.legend(frameon=False, fontsize=8)
    save(figure, "ccq")


def lucid() -> None:
    """The matrix of overlaps of keys in three clusters, its inverse, and how far a read at a token is from its value."""
    T, K = 36, 16
    centres = normalize(torch.randn(3, K), dim=-1)
    k = normalize(centres[torch.arange(T) % 3] + 0.12 * torch.randn(T, K), dim=-1)
    P = torch.exp(K**0.5 * (k @ k.T - 1)).tril()
    figure, axes = plt.subplots(1, 3, figsize=(9, 3))
    for axis, matrix, title in zip(axes, (P, torch.linalg.inv(P)), ("P", "P⁻¹"), strict=False):
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
        axis.set(title=title, xlabel="token j", ylabel="token i")
    figure.colorbar(image, ax=axes[1], fraction=0.046)
    v = torch.randn(1, T, 1, K)
    y = chunk_lucid(k[None, :, None], v).y
    weights = P / P.sum(-1, keepdim=True)  # softmax of a query that is the token's own key
    target = v[0, :, 0] / P.sum(-1, keepdim=True)
    for values, colour, name in ((v, GREY, "values"), (y, BLUE, "solved values")):
        miss = (weights @ values[0, :, 0] - target).norm(dim=-1) / target.norm(dim=-1)
        axes[2].semilogy(miss.clamp(min=1e-7), color=colour, label=name)
    axes[2].set(xlabel="token i", title="‖read − value·w‖ / ‖value·w‖")
    axes[2].legend(frameon=False, fontsize=8)
    save(figure, "lucid")


def polar() -> None:
    """The magnitude against the number of keys that match the query, among n."""
    d, figure = 32, plt.figure(figsize=(4.6, 3))
    basis = torch.eye(d)
    for n, colour in ((64, GREY), (512, GREEN), (2048, BLUE)):
        found, counts = [], [m for m in (0, 1, 2, 4, 8, 16, 32, 64) if m <= n]
        for m in counts:
            k = torch.where((torch.arange(n) < m)[:, None], basis[0], basis[1])[None, :, None] * d**0.5
            q, v = (basis[0] * d**0.5).expand(1, n, 1, d).contiguous(), torch.randn(1, n, 1, d)
            raw = (torch.tensor([x]) for x in (-1.0, -1.5, 0.5, 2.0))  # the layer's starts
            magnitude = chunk_polar(q, k, v, *raw, torch.zeros(1, d)).magnitude
            found.append(magnitude[0, -1, 0].item())
        plt.plot(counts, found, "o-", markersize=3, color=colour, label=f"n = {n}")
    plt.gca().set(xlabel="keys equal to the query", ylabel="magnitude", ylim=(0, 1))
    plt.xscale("symlog", base=2)
    plt.xlim(-0.2)  # a symmetric scale would go on to −2
    plt.legend(frameon=False, fontsize=8)
    save(figure, "polar")


def error_budget() -> None:
    """The worst error of each op over its budget, from the cards."""
    figure, axis = plt.subplots(figsize=(6, 3))
    worst = {}
    for op in OPS:
        _, _, *rows = [
            line.strip("| ").split(" | ") for line in cards.section(cards.card(op).read_text()).splitlines() if "|" in line
        ]
        worst[op] = [max(map(float, column)) for column in zip(*(row[1:] for row in rows), strict=True)]
    for i, (dtype, colour) in enumerate((("float32", BLUE), ("bfloat16", ORANGE), ("float16", GREEN))):
        axis.bar(
            [x + 0.27 * (i - 1) for x in range(len(worst))], [w[i] for w in worst.values()], 0.25, color=colour, label=dtype
        )
    axis.axhline(1, color="black", linewidth=1)
    axis.set(xticks=range(len(worst)), xticklabels=list(worst), ylabel="worst error ÷ budget", ylim=(0, 1.25))
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper center")
    save(figure, "error_budget")


if __name__ == "__main__":
    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "needlework",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    for draw in (one_recurrence, ccq, lucid, polar, error_budget):
        torch.manual_seed(0)
        draw()
