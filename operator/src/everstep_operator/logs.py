"""One line per event, JSON by default; kopf's and the client's own lines come out the same way, from warnings up."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from everstep_operator.cluster.log_limit import LogRateLimiter

# `kubernetes.aio.client.rest` logs whole bodies at debug, Secrets included; aiohttp and kopf say at info what we say.
_NOISY = ("kopf", "kubernetes", "aiohttp", "asyncio", "urllib3")


class _KopfLogFilter(logging.Filter):
    """Lets each of kopf's lines pass once a minute: it tells of each of its ends with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LogRateLimiter()

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("kopf"):
            return True
        return self._limit.left_out((record.name, str(record.msg))) is not None


def configure_logging(level: str, form: str) -> None:
    """Set up structlog and the standard library's logging. Call once."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Any] = (
        # As text: structlog's structured tracebacks carry local variables, and one of ours is the operator key.
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if form == "json"
        else [structlog.processors.format_exc_info, structlog.dev.ConsoleRenderer(colors=False)]
    )
    threshold = getattr(logging, level.upper())
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(allow=())],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    handler.addFilter(_KopfLogFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.INFO))
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # "OS signals are ignored: running not in the main thread": that is why it runs there.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
