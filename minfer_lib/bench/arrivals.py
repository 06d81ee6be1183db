"""When requests come: all at once, or at random moments of a given rate.

Invariant: arrivals are seconds from the start of a run, one for each request, and a function of the numbers they were
asked with. They are fixed before the run begins and do not wait for the system under load: a slow one gets the next
request at the same moment as a fast one (an open loop). A client that waits for an answer before it sends the next
request would spare a slow server the queue that it has earned.
"""

from __future__ import annotations

import random
import sys

from ..errors import InvalidParameter, integer, shown


def all_at_once(n: int) -> tuple[float, ...]:
    """`n` requests that are all there at the start."""
    return (0.0,) * integer("n", n, at_least=1)


def poisson_arrivals(n: int, rate: float, seed: int = 0) -> tuple[float, ...]:
    """`n` moments of a Poisson process with `rate` requests a second: the gaps between them, the first one included,
    are independent and exponentially distributed with mean 1 / rate.

    The same seed gives the same pattern at every rate, only stretched in time, so that a curve over rates compares like
    with like. rate=math.inf is all at once. Raises `InvalidParameter` for a rate of 0 or less.
    """
    known = isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0
    if not known or (isinstance(rate, int) and rate > sys.float_info.max):
        raise InvalidParameter(f"rate={shown(rate)} is not possible: it must be requests a second, more than 0.")
    rng = random.Random(seed)  # of Python, not of torch: the same numbers on every version and device
    moments, now = [], 0.0
    for _ in range(integer("n", n, at_least=1)):
        now += rng.expovariate(1.0)
        moments.append(now / rate)
    return tuple(moments)
