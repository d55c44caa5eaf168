"""`python -m everstep.compat train.py …`: runs a script as it is, with other libraries' names to import."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from everstep.compat import install
from everstep.compat.hook import NAMES


def main() -> None:
    """Run the script. It sees its own arguments, and its folder first in sys.path, as if Python had been given it."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m everstep.compat SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    install()
    sys.path.append(str(NAMES))  # for the processes that it spawns
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
