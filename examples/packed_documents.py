"""Documents of different lengths in one row, without padding: packed = separate.

You learn: `cu_seqlens` [N+1] says where each document of a packed row begins and ends. A state starts anew at each document, attention
does not look across, convolutions start with zeros. Outputs, final states and gradients are those of the documents one by one.
"""

import torch

from needlework.layers import Attention, Lucid, Rope, build

LENGTHS, DIM = (13, 1, 30), 32


def main() -> None:
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    row = torch.randn(1, sum(LENGTHS), DIM)
    mixers = {name: build(name, dim=DIM, heads=2) for name in ("qdelta", "carve", "ccq", "polar")}
    mixers["lucid in a window"] = Attention(heads=2, head_dim=16, attend=Lucid(window=8), position=Rope()).build(DIM)
    for name, mixer in mixers.items():
        packed, _ = mixer(row, cu_seqlens=cu_seqlens)
        separate = torch.cat([mixer(document)[0] for document in row.split(LENGTHS, 1)], 1)
        torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)

        joined, _ = mixer(row)  # without cu_seqlens the row is one document
        assert not torch.allclose(packed, joined, atol=1e-3)

        gradients = [torch.autograd.grad(y.square().sum(), mixer.parameters()) for y in (packed, separate)]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        print(f"{name}: a row of {len(LENGTHS)} documents is its documents, difference {(packed - separate).abs().max():.1e}")


if __name__ == "__main__":
    main()
