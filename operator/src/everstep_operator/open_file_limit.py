"""The limit of files that the process may have open: each leader that is polled holds a connection."""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger(__name__)

MAX_OPEN_FILES = 1 << 20  # what the kernel allows at most, as it comes (fs.nr_open)
OTHER_FILES = 640  # connections to the API server (528 where requests hang), watches, probes, metrics, logs


def raise_open_file_limit(wished: int) -> int:
    """Raise the limit of open files to the hard limit, and return how many leaders can be connected to at once.

    Container runtimes start processes with a soft limit of 1024. Beyond the limit every request would fail, those to
    the API server too; with fewer connections than leaders, leaders are asked in turn.

    Args:
        wished: What the settings allow.

    Returns:
        `wished`, or less where the hard limit has no room for so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        except (OSError, ValueError) as error:
            log.warning("cannot raise the limit of open files", soft=soft, hard=hard, error=str(error))
    if soft == resource.RLIM_INFINITY or soft >= wished + OTHER_FILES:
        return wished
    fitting = max(1, soft - OTHER_FILES)
    log.warning(
        "too few open files for the leaders: more of them than fit are asked in turn; raise the limit of open files "
        "(nofile) of the container runtime, or lower EVERSTEP_LEADER_CONNECTIONS",
        open_files=soft, leader_connections=wished, at_once=fitting, needed=wished + OTHER_FILES,
    )  # fmt: skip
    return fitting
