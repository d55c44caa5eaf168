"""The arguments of a session, checked before anything is opened: what is wrong is said at once, in the script's words.

Later it would be found by one rank or by the writer alone, hours after the run has begun.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

from everstep.checkpoint.catalog.best import Mode
from everstep.checkpoint.format.checksum import ALGORITHMS
from everstep.checkpoint.format.keys import Attempt
from everstep.checkpoint.save.trigger import parse_duration

LONGEST = 1e9  # seconds; what is multiplied by a thousand still is a time for all clocks

POLICIES = ("skip", "wait", "queue")
DEFAULT_EVERY = "10m"


class _Wrong(Exception):
    """The value is not allowed; says what is."""


def check_argument(name: str, value: Any) -> Any:
    """Return the value of an argument or an option, with a plain number in place of one of another library.

    Args:
        name: The name of the argument.
        value: Its value.

    Raises:
        ValueError: The value is not allowed; names it, and what is allowed.
    """
    try:
        return CHECKS[name](value)
    except _Wrong as allowed:
        raise ValueError(f"{name} is {value!r}, and must be {allowed}") from None


def _check_count(value: Any, least: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise _Wrong(f"a whole number, at least {least}")
    return number


def _check_seconds(value: Any, *, may_be_zero: bool = False) -> float:
    allowed = "a number of seconds, 0 or more" if may_be_zero else "a number of seconds, more than 0"
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise _Wrong(allowed)
    seconds = float(value)
    if not (math.isfinite(seconds) and (seconds > 0 or (may_be_zero and seconds == 0)) and seconds <= LONGEST):
        raise _Wrong(f"{allowed}, and at most {LONGEST:g}")
    return seconds


def _check_interval(value: Any) -> Any:
    if value == "auto":
        return value
    try:
        return parse_duration(value) if isinstance(value, str) else _check_seconds(value)
    except (ValueError, _Wrong):
        raise _Wrong("a time as '90s', '10m' or '1h30m', a number of seconds above 0, 'auto' or None") from None


def _one_of(*allowed: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        found = [each for each in allowed if type(each) is type(value) and each == value]
        if not found:
            raise _Wrong(f"one of {', '.join(map(repr, allowed))}")
        return found[0]

    return check


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except _Wrong as allowed:
            said = str(allowed)
            raise _Wrong(said if said.endswith("None") else f"{said}, or None") from None

    return checked


def _check_place(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise _Wrong("a folder or a URL, as text or a path")
    return value


def _check_store(value: Any) -> Any:
    if str(_check_place(value)).startswith("memory://"):
        raise _Wrong(
            "a place that other processes reach too, since one beside the ranks stores what they save: a folder (of "
            "tempfile.mkdtemp() for a trial) or a URL as s3://bucket/run"
        )
    return value


def _check_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Wrong("a name, as text")
    return value


def _check_attempt(value: Any) -> tuple[int, int]:
    try:
        epoch, generation = value
        found = Attempt(_check_count(epoch, 0), _check_count(generation, 0))
    except (TypeError, ValueError, _Wrong):
        raise _Wrong("two whole numbers, 0 or more, of at most ten digits: (epoch, generation)") from None
    return found.epoch, found.generation


def _check_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _Wrong("a dictionary of the store's options by their names")
    return dict(value)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "store": _check_store,
    "every": _or_none(_check_interval),
    "every_steps": _or_none(_check_count),
    "keep_last": _check_count,
    "keep_every": _or_none(_check_count),
    "keep_best": _or_none(_check_count),
    "best_metric": _check_text,
    "best_mode": _one_of(*get_args(Mode)),
    "policy": _one_of(*POLICIES),
    "slots": _check_count,
    "peers": _or_none(_one_of(0, 1)),
    "directory": _or_none(_check_place),
    "attempt": _or_none(_check_attempt),
    "checksum": _one_of(*ALGORITHMS),
    "allow_pickle": _one_of(False, True),
    "time_between_failures": _or_none(_check_seconds),
    "timeout": _check_seconds,
    "commit_timeout": _check_seconds,
    "stall_after": _check_seconds,
    "linger": lambda value: _check_seconds(value, may_be_zero=True),
    "options": _or_none(_check_options),
}
