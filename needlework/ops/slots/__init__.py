"""Tables of states, one slot a sequence, read and written in place. Knows no op.

table: what a call on a table accepts, and its slots in plain torch · kernels: what kernels read of a table, and what they leave out ·
rows: a table's small columns as rows of a call.
"""
