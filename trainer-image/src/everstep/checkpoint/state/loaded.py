"""Asks whether a value is of a class of torch whose module takes seconds to import, without importing it.

A process that has not imported the module holds no instance of the class.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Tell whether a value is a DTensor."""
    return is_instance(value, "torch.distributed.tensor", "DTensor")


def is_instance(value: object, module: str, name: str) -> bool:
    """Tell whether a value is an instance of a class.

    Args:
        value: Anything.
        module: The module from which the class can be imported, by its full name.
        name: The class in it.
    """
    found = sys.modules.get(module)
    kind = None if found is None else found.__dict__.get(name)
    return isinstance(kind, type) and isinstance(value, kind)
