"""Bounded repetition with full jitter: after the n-th failure, wait between nothing and first·2ⁿ seconds.

Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. Jitter over the whole interval
spreads a thousand ranks that a store has slowed down at the same moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from everstep.checkpoint.errors import Full, StoreError

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """`tries` in all, the first included; `first` and `longest` wait in seconds. After `within` seconds none begins."""

    tries: int = 6
    first: float = 0.2
    longest: float = 10.0
    within: float = math.inf
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, after as many tries as are needed and allowed.

        Raises:
            StoreError: The last one of `call`, when the tries are used up; at once if it is Full or cannot pass.
        """
        repeat = Retrying(
            stop=stop_after_attempt(self.tries) | stop_after_delay(self.within),
            wait=wait_random_exponential(multiplier=self.first, max=self.longest),
            retry=retry_if_exception(_may_pass),
            sleep=self.sleep,
            reraise=True,
        )
        return repeat(call)


def _may_pass(error: BaseException) -> bool:
    # Room is made by retention or by people, not within seconds.
    return isinstance(error, StoreError) and error.may_pass and not isinstance(error, Full)
