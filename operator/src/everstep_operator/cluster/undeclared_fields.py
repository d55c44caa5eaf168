"""Parts of the status that the CRDs lack: somebody else installs them, and has not upgraded them yet.

The API server drops unknown fields of a create or an update, but rejects a whole apply for one of them, with a 500 that
names them; and a condition of a type that the CRD does not list with a 422. No status could be written, and nothing be
done for any job: so the status is written without them. What must be on record is left out of none: a merge patch,
of which it would be dropped without a word, has it only once an apply has shown that there is a place for it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from everstep_operator.api.status import TrainingJobStatus
from everstep_operator.cluster.log_limit import LogRateLimiter

log = structlog.get_logger(__name__)

LIFETIME_SECONDS = 300.0  # then all fields are tried again: the CRDs may have been upgraded
_NAMED = re.compile(r"(\.status(?:\.\w+|\[[^\]]*\])+): field not declared in schema")
_CONDITION = re.compile(r'status\.conditions\[\d+\]\.type: Unsupported value: "(\w+)"')
_SELECTOR = re.compile(r"\[[^\]]*\]")

FieldPath = tuple[str, ...]
# An epoch or a charge is on record before anything follows from it: nothing is done over CRDs that cannot hold them.
_NEEDED: frozenset[FieldPath] = frozenset(
    tuple(path.split("."))
    for path in (
        "phase", "epoch", "generation", "template", "template.epoch", "template.plain", "restarts", "restarts.charges",
        "restarts.charges.id", "restarts.charges.cause", "restarts.charges.time", "transitions", "transitions.phase",
        "transitions.reason", "transitions.start",
    )
)  # fmt: skip


@dataclass
class UndeclaredFields:
    """The paths of such fields, and such types of conditions, as far as rejections have named them; `clock` returns
    monotonic seconds."""

    clock: Callable[[], float] = time.monotonic
    _paths: set[FieldPath] = field(default_factory=set)
    _types: set[str] = field(default_factory=set)
    _held: set[FieldPath] = field(default_factory=set)  # needed ones that were stored
    _until: float = 0.0
    _logs: LogRateLimiter = field(default_factory=LogRateLimiter)

    def learn(self, message: str) -> bool:
        """Take in a rejection. Return whether it names fields that were not known to be missing, and that a status can
        do without.

        Args:
            message: The API server's.
        """
        named = {tuple(_SELECTOR.sub("", path).split(".")[2:]) for path in _NAMED.findall(message)}
        types = set(_CONDITION.findall(message))
        if named & _NEEDED:
            self._held.clear()
            return False
        if named <= self._paths and types <= self._types:
            return False
        self._paths |= named
        self._types |= types
        self._until = self.clock() + LIFETIME_SECONDS
        if (left_out := self._logs.left_out("undeclared")) is not None:
            log.warning(
                "the CRDs are older than the operator: upgrade them; statuses are written without these parts",
                fields=sorted(".".join(("status", *path)) for path in self._paths),
                conditions=sorted(self._types),
                times_before=left_out,
            )
        return True

    def note_stored(self, status: Mapping[str, Any]) -> None:
        """Take in a status that was applied, as it is stored then."""
        self._held |= _list_needed(status)

    def can_hold(self, status: Mapping[str, Any]) -> bool:
        """Return whether the CRDs are known to hold all of a status that must be on record.

        Args:
            status: A status, as JSON has it.
        """
        return _list_needed(status) <= self._held

    def keep(self, status: TrainingJobStatus) -> dict[str, Any]:
        """Return the fields of a status that are known to be missing as a whole, by their names in the model: what a
        plan is made from, and nobody stores.

        Args:
            status: The status that was to be written.
        """
        missing = {path[0] for path in self._paths if len(path) == 1}
        return {
            name: getattr(status, name) for name, known in type(status).model_fields.items() if known.alias in missing
        }

    def strip(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return a status without the fields that are known to be missing.

        Args:
            status: A status, as JSON has it.
        """
        if self.clock() >= self._until:
            self._paths.clear()
            self._types.clear()
        if self._types:
            told = [each for each in status.get("conditions") or () if each["type"] not in self._types]
            status = {**status, "conditions": told}
        for path in self._paths:
            status = _without(status, path)
        return status


def _list_needed(status: Mapping[str, Any]) -> set[FieldPath]:
    return {path for path in _NEEDED if _has(status, path)}


def _has(value: Any, path: FieldPath) -> bool:
    """Return whether a value has the field of this path; of a list the first item counts, which is like all others."""
    for name in path:
        if isinstance(value, list):
            value = value[0] if value else None
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True


def _without(value: Any, path: Sequence[str]) -> Any:
    """Return a copy of a value without the field of this path, in all items of each list on the way."""
    if isinstance(value, list):
        return [_without(item, path) for item in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {name: item for name, item in value.items() if name != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])}
