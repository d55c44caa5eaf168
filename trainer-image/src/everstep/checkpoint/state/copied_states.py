"""Tell what a state_dict() has returned from other dictionaries: a copy, which does not follow its object."""

from __future__ import annotations

from collections.abc import Mapping

# The names by which each is known, of torch's own classes and of what is derived from them.
_KEYS: dict[str, frozenset[str]] = {
    "an optimizer": frozenset({"state", "param_groups"}),
    "a learning rate scheduler": frozenset({"_last_lr"}),
    "a GradScaler": frozenset({"scale", "_growth_tracker"}),
}


def explain_copied_state(name: str, value: object) -> str | None:
    """Return why a dictionary is not to be saved under a name of its own; None where nothing speaks against it.

    Args:
        name: The name.
        value: What a script gave under it.
    """
    if not isinstance(value, Mapping):
        return None
    source = next((source for source, keys in _KEYS.items() if keys <= value.keys()), None)
    if source is None or ("param_groups" in value and not _has_param_groups(value["param_groups"])):
        return None
    return (
        f"{name} is what state_dict() of {source} has returned: a copy, which would be saved as that for ever, and "
        f"would be restored in place of the object. Give the object itself"
    )


def _has_param_groups(value: object) -> bool:
    """Return whether these are groups as an optimizer has them, and not a script's own use of the word."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(group, Mapping) and "params" in group for group in value)
