"""LUCID-PaTH's solve in Triton kernels: a scan over superblocks, and PaTH's own backward for what its scores are made of."""
