"""What attention ops share, in plain PyTorch. Knows no op.

fused: softmax attention by PyTorch's own kernels, in windows and over packed documents · flash: the latter in half precision ·
blocks: which blocks of queries and keys meet · pages, growth: states that grow, a row a token, and their gradient.
"""
