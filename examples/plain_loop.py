"""A mixer in your own PyTorch loop.

You learn: `build` makes a mixer of the catalog as an `nn.Module`, [B T D] -> [B T D]; it returns `(y, state)`; torch trains it.

The task is associative recall: pairs of a key and a value, then the keys again; after a key the model must say its value. The loss
falls from log(vocabulary) to near zero, and the accuracy is asserted.
"""

import torch
from torch import nn
from torch.nn import functional as F

from needlework.data import MQAR
from needlework.layers import build

DIM, LENGTH, BATCH, STEPS = 32, 16, 32, 150


class Block(nn.Module):
    """A mixer and an MLP, each behind a norm and beside a residual, as in any transformer."""

    def __init__(self, mixer: nn.Module, dim: int):
        super().__init__()
        self.mixer, self.mixer_norm = mixer, nn.RMSNorm(dim)
        self.mlp, self.mlp_norm = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)), nn.RMSNorm(dim)

    def forward(self, x):
        y, _ = self.mixer(self.mixer_norm(x))  # the state is None unless output_final_state=True
        x = x + y
        return x + self.mlp(self.mlp_norm(x))


def main() -> None:
    torch.manual_seed(0)
    task = MQAR(vocab=16, pairs=4)
    blocks = [Block(build("qdelta", dim=DIM, heads=1), DIM) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(task.vocab, DIM), *blocks, nn.RMSNorm(DIM), nn.Linear(DIM, task.vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch = task.batch(seed=0, step=step, B=BATCH, T=LENGTH)
        loss = F.cross_entropy(model(batch.input_ids).flatten(0, 1), batch.labels.flatten())  # −100: not asked
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    batch = task.batch(seed=1, step=0, B=256, T=LENGTH)  # rows that were not trained on
    asked = batch.labels != -100
    with torch.no_grad():
        right = (model(batch.input_ids).argmax(-1) == batch.labels)[asked].float().mean().item()
    print(f"values recalled: {right:.1%}, by chance {1 / (task.vocab // 2):.1%}")
    assert right > 0.9


if __name__ == "__main__":
    main()
