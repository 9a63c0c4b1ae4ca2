"""Moments of Beta distributions, for right values of allocations under uncertain values."""


def moment(a, b, p, q):
    """`E[X^p (1 - X)^q]` for `X ~ Beta(a, b)`, by the chances of one draw after the other."""
    chance = 1.0
    for i in range(p):
        chance *= (a + i) / (a + b + i)
    for i in range(q):
        chance *= (b + i) / (a + b + p + i)
    return chance
