"""The legend: one letter, one meaning, everywhere in this library.

    B  batch                      T  tokens                  N  packed sequences
    H  key heads                  HV value heads             Hq, Hkv  query and key-value heads (attention)
    K  key dim                    V  value dim               D  model dim
    C  chunk (of a kernel)        L  content chunk (CARVE)   R  rows a token (CARVE, Mamba-3)
    m  pairs of channels that turn (Mamba-3)
    W  window: keys with 0 <= i - j < W are visible, the query's own included

    q, k         [B T H K]        query, key                 v  [B T HV V]   value
    g            [B T HV] or [B T HV K]   log decay, natural log, <= 0
    beta, lam    [B T HV]         write strength; Q-Delta's lambda
    eta          [B T HV]         CCQ's lambda
    S            [N HV K V]       state, K first, float32 or wider
    cu_seqlens   [N+1] int        packs N sequences along T; B is then 1
    scale        multiplies the read; default K ** -0.5

Value head j reads key head j // (HV // H). float64 in computes in float64; anything narrower computes in float32.
"""
