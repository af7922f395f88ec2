"""Mathematics that two ops or more use unchanged, in plain PyTorch. Knows no op.

shapes: argument checks · packing, alignment: packed sequences, as a padded batch and as runs of whole chunks · decay: sums of log decays ·
operands, samples: what specs and references share · kernels: the same in Triton.
"""
