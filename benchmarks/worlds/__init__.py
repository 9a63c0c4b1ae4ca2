"""
Small worlds that a tiny policy learns in minutes on two cores, for comparing methods on real training runs.

    base.py        what a world is: rows, the environment, the right turns, demonstrations
    chain.py       answer a symbol per turn; every answer counts. Also with tasks of which most are out of
                   reach (`scarce_chain`)
    hops.py        look facts up in an encyclopedia, one page per turn
    policy.py      tokenizer, model, and the exact value of a history
    warm_start.py  makes the policies in warm_start/
"""

from .base import World
from .chain import Chain, ScarceChain
from .hops import Hops


WORLDS: dict[str, type[World]] = {world.name: world for world in (Chain, Hops, ScarceChain)}
