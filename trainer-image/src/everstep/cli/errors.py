"""The error of a command that cannot do what was asked."""

from __future__ import annotations


class CliError(Exception):
    """Ends the command with this message and code; the message tells what to do."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
