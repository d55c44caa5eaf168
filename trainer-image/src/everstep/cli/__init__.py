"""The `everstep` command: one file per subcommand, plus the rooms they share (terminal, log lines, cluster, local run).

What a subcommand needs beyond typer is imported inside it: `everstep --help` must answer at once, and `everstep
validate` must work where neither torch nor the Kubernetes client is installed.
"""

from __future__ import annotations

import errno
import io
import os
import sys


def main() -> None:
    from everstep.cli.app import app
    from everstep.cli.errors import CliError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # programs print characters that the encoding of a locale may lack
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except CliError as error:
        sys.stderr.write(f"everstep: {error}\n")
        sys.exit(error.code)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        sys.stderr.write("everstep: the output cannot be written: No space left on device: make room there\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written there is not tried again
        sys.exit(1)
