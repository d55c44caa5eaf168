"""Define the errors that say what is rejected, and why."""

from __future__ import annotations


class PipelineError(ValueError):
    """Something cannot be right, or cannot be at all; the message says what, where, and what to do instead."""


class Everywhere(PipelineError):
    """The same on all ranks, none of which has begun what it is about."""
