"""The command `everstep-operator`, which is `python -m everstep_operator` too."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the operator."""
    leave_out_synchronous_client()
    from everstep_operator.app import main as run_command

    run_command()


def leave_out_synchronous_client() -> None:
    """Have `kubernetes.aio` imported without the rest of its package, before anything imports it.

    The client has a module for each type of the API, twice: for threads and for asyncio. `kubernetes/__init__.py`
    imports the first half, which nothing here uses: 40 MiB, and half of what a start of the process imports. So the
    package is put into its place without being executed; its parts are found by its path all the same.
    """
    spec = importlib.util.find_spec("kubernetes")
    if spec is None or "kubernetes" in sys.modules:
        return
    sys.modules["kubernetes"] = importlib.util.module_from_spec(spec)
    # kopf would import it in order to recognise its classes; it does without where there is none.
    sys.modules["kubernetes.client"] = None  # type: ignore[assignment]


if __name__ == "__main__":
    main()
