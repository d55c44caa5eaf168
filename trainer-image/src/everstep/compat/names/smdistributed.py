"""Stands in `sys.path` for the names, for processes that did not ask for them.

A process that `multiprocessing` spawns imports the script anew, by its path: it gets its parent's `sys.path`, and
nothing else by which it could know that the script runs with these names.
"""

from __future__ import annotations

import importlib
import sys

from everstep.compat import install

del sys.modules[__name__]  # the module of the true name takes its place
install()
importlib.import_module(__name__)
