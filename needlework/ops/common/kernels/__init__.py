"""Triton code that two ops or more use. Knows no op.

tile: tiles loaded and stored, by the copy engine or by pointers · chain: chunks shared out among persistent programs · runs: sequences as
runs of whole blocks · softmax: sums that rise with a maximum.
"""
