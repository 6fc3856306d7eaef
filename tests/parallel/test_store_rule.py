"""Every order in which two workers of a parameter store may act: nobody waits for ever."""

from __future__ import annotations

import pytest

from ringreduce.parallel import store_rule
from tests.support.store_walk import World

import sys, time
MODES = [(0, 0), (0, 1), (1, 0), (2, 0), (None, 0)]

if __name__ == "__main__":
    for s, b in MODES:
        for kw in [{}, dict(losses=1), dict(counts=(4,)), dict(counts=(3,),losses=1), dict(counts=(3,2)), dict(counts=(2,1),breaks=1), dict(deaths=1), dict(deaths=1,counts=(2,1)), dict(deaths=1,losses=1, counts=(3,))]:
            t=time.time()
            w = World(store_rule.Rule, 2, s, b, **kw)
            worlds=list(w.states())
            print(s,b,kw, len(worlds), max(x.ahead for x in worlds), f"{time.time()-t:.1f}", flush=True)
