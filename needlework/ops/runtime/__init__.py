"""What a Triton op needs beside mathematics. Knows no op.

launch_configs: the tables of constants, and which row is taken · denylist: rows that doctor found wrong on this machine ·
precompile: a first call's kernels compiled in parallel · launcher: launches at little cost on the host · replayed: launches by the
hundred as a CUDA graph · compile: kernels compiled without a GPU · custom_op, signature: functions of NamedTuples as operators of
torch.library · each: a function of every tensor among arguments · precision: operators under autocast · compile_cache: the key of
graphs on disk · constant: what torch.compile takes as a constant · triton_types: dtypes and sizes as kernels have them.
"""
