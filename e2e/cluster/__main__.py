"""Entry point: one clear sentence and an exit code instead of a traceback."""

from __future__ import annotations

import sys

from e2e.cluster.cli import app
from e2e.cluster.errors import ClusterError, NoBackendError

EXIT_FAILED = 1
EXIT_NO_BACKEND = 3

if __name__ == "__main__":
    try:
        app()
    except NoBackendError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_NO_BACKEND)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
