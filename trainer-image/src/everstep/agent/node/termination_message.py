"""The last message of the agent's container, from which the operator learns what nobody else can tell any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everstep.agent.system.agent_log import log_line
from everstep.agent.wire.protocol import bounded_tail

MAX_TERMINATION_BYTES = 4096
CANNOT_RUN = 120


def safe_exit_code(code: int) -> int:
    """Return an exit code that is not 120, which means "the agent cannot run in this image"; Python itself uses it when
    a flush at exit fails."""
    return 1 if code == CANNOT_RUN else code & 0xFF


def encode_termination_message(word: dict[str, Any]) -> bytes:
    """Return JSON of at most 4,096 bytes: what tells least goes first, from the start of the log tail to the message.

    The generation history stays: it is short, and what it tells nobody else can tell any more. The tail is the last
    field and the message the one before: of a pod with more than three containers a kubelet keeps 12 KiB in all, each
    with the beginning of its share.
    """
    message, tail = word.get("message", ""), bounded_tail(word.get("logTail", ()))
    word = {name: value for name, value in word.items() if name not in ("message", "logTail")}
    word.update(message=message, logTail=tail)
    while True:
        data = json.dumps(word, separators=(",", ":")).encode()
        if len(data) <= MAX_TERMINATION_BYTES:
            return data
        if word["logTail"]:
            word["logTail"] = word["logTail"][1:]
        else:
            word["message"] = str(word.get("message", ""))[: len(str(word.get("message", ""))) // 2]


def write_termination_message(path: Path, word: dict[str, Any]) -> None:
    try:
        path.write_bytes(encode_termination_message(word))
    except OSError as error:
        log_line(f"cannot write {path}: {error.strerror}")
