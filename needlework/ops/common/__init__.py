"""Mathematics that two ops or more use unchanged, in plain PyTorch. Knows no op.

shapes: argument checks · packing, alignment: packed sequences, as a padded batch and as runs of whole chunks · slots: steps on a
table of states · pages, growth: states that grow · placement: which rows of shared pages are whose · blocks: which blocks of queries
and keys meet · decay: sums of log decays · unit: rows of unit norm · conv, attention: the layers' convolution and softmax attention ·
operands, samples: what specs and references share · kernels: the same in Triton.
"""
