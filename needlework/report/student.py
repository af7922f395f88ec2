"""Student's t for whole degrees of freedom, exact: intervals and p values of the mean of a few values.

with tan θ = t/√ν,  P(|T| <= t) = sin θ (1 + ½ cos² θ + (1·3)/(2·4) cos⁴ θ + … to cos^(ν−2))                    ν even
                                = 2/π [θ + sin θ cos θ (1 + ⅔ cos² θ + (2·4)/(3·5) cos⁴ θ + … to cos^(ν−3))]     ν odd
"""

import math


def inside(t: float, freedom: int) -> float:
    """P(|T| <= t) for `freedom` >= 1 degrees of freedom, t >= 0."""
    angle = math.atan(t / math.sqrt(freedom))
    square, term, total = math.cos(angle) ** 2, 1.0, 0.0
    odd = freedom % 2
    for n in range(1, freedom // 2 + 1):
        total += term
        term *= square * (2 * n - 1 + odd) / (2 * n + odd)
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)


def quantile(freedom: int, share: float = 0.95) -> float:
    """The t with P(|T| <= t) = share."""
    low, high = 0.0, 1.0
    while inside(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < share else (low, middle)
    return high


def holm(values: list[float]) -> list[float]:
    """p values as Holm adjusts them for being judged together: p₍ᵢ₎ -> max over j <= i of (n − j + 1) p₍ⱼ₎, at most 1."""
    adjusted, least = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, (len(values) - rank) * values[i])
        adjusted[i] = min(1.0, least)
    return adjusted
