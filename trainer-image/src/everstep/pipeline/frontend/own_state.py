"""Modules of which a part would leave something out: hooks on calls, a state of their own in a state dictionary."""

from __future__ import annotations

from torch import nn

from everstep.pipeline.frontend.compiled import COMPILED, is_compiled

# What stands for a module has its hooks from before a state is loaded too, as those that rename what older ones had.
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_METHODS = ("get_extra_state", "_save_to_state_dict", "_load_from_state_dict")


def explain_own_state(module: nn.Module) -> str:
    """Return why a module that has others in it is in one stage as a whole, or an empty string.

    What stands for a part of it would be saved without its extra state, under other names than its hooks give, and
    restored without both.
    """
    if not module._modules:
        return ""
    if any(getattr(module, name, None) for name in _STATE_HOOKS):
        return "it has hooks on its state dictionary"
    kind = type(module)
    changed = [name for name in _METHODS if getattr(kind, name) is not getattr(nn.Module, name)]
    return f"it has a state of its own ({changed[0]})" if changed else ""


def explain_hooks(module: nn.Module) -> str:
    """Return the reason why a module runs as one, or an empty string.

    Hooks see all that a module is given, and parts of a compiled module would run uncompiled.
    """
    if is_compiled(module):
        return COMPILED
    return "it has hooks" if any(getattr(module, name) for name in _CALL_HOOKS) else ""
