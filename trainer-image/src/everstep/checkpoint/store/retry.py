"""Bounded repetition with full jitter: after the n-th failure, wait between nothing and first·2ⁿ seconds.

Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. Jitter over the whole interval
spreads a thousand ranks that a store has slowed down at the same moment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from everstep.checkpoint.errors import Full, StoreError

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """`tries` in all, the first included; `first` and `longest` wait in seconds."""

    tries: int = 6
    first: float = 0.2
    longest: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, after as many tries as are needed and allowed.

        Raises:
            StoreError: The last one of `call`, when the tries are used up; at once if it is Full or cannot pass.
        """
        for failures in range(self.tries - 1):
            try:
                return call()
            except Full:
                # Room is made by retention or by people, not within seconds.
                raise
            except StoreError as error:
                if not error.may_pass:
                    raise
            self.sleep(self.uniform(0, min(self.longest, self.first * 2**failures)))
        return call()
