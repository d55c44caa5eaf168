"""Processes of tests are children of one server, which has imported what they need: a child takes milliseconds."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Return the context that starts them. Not by a fork of the test's process, which has threads."""
    context = multiprocessing.get_context("forkserver")
    # The first to ask starts the server, and all others get the same one.
    context.set_forkserver_preload(["tests.checkpoint.preloaded"])
    return context
