"""Modules that have a state of their own in a state dictionary, which a part of such a module would leave out."""

from __future__ import annotations

from torch import nn

# What stands for a module has its hooks from before a state is loaded too, as those that rename what older ones had.
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_METHODS = ("get_extra_state", "_save_to_state_dict", "_load_from_state_dict")


def explain_own_state(module: nn.Module) -> str:
    """Return why a module that has others in it is in one stage as a whole, or an empty string.

    What stands for a part of it would be saved without its extra state, under other names than its hooks give, and
    restored without both.
    """
    if not module._modules:
        return ""
    if any(getattr(module, name, None) for name in _HOOKS):
        return "it has hooks on its state dictionary"
    kind = type(module)
    changed = [name for name in _METHODS if getattr(kind, name) is not getattr(nn.Module, name)]
    return f"it has a state of its own ({changed[0]})" if changed else ""
