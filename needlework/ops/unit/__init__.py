"""Rows of unit norm. Knows no op.

reference: as they are written · rows: in one pass, by kernels.
"""
