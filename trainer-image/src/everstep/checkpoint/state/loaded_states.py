"""States as torch's `Optimizer.load_state_dict` makes them get their own types again."""

from __future__ import annotations

import copy
from typing import Any

from everstep.checkpoint.state.kinds import is_tensor

# torch keeps this one in main memory unless the optimizer is capturable, and load_state_dict moves it then.
STEP = "step"


def undo_casts(live: Any, loaded: Any, taken: dict[int, Any], key: str = "") -> Any:
    """Return what load_state_dict has made of a loaded state, with the types that were loaded.

    Args:
        live: That.
        loaded: What was given to it.
        taken: By identity of what was loaded, what the optimizer has for it by now.
        key: Of the state, where it is one of a parameter's own: where its step is, torch knows better.
    """
    if id(loaded) in taken:
        return taken[id(loaded)]
    found: Any = loaded
    if is_tensor(loaded):
        is_cast = is_tensor(live) and live.dtype != loaded.dtype and key != STEP
        found = loaded.to(live.device) if is_cast else live
    elif key == STEP:
        return live
    elif isinstance(loaded, dict) and isinstance(live, dict):
        found = copy.copy(loaded)
        found.update({each: undo_casts(live.get(each), loaded[each], taken) for each in loaded})
    elif type(loaded) in (list, tuple) and isinstance(live, list | tuple) and len(live) == len(loaded):
        found = type(loaded)([undo_casts(*pair, taken) for pair in zip(live, loaded, strict=True)])
    if isinstance(loaded, dict | list) or is_tensor(loaded):
        taken[id(loaded)] = found
    return found


def leave_out_others(state: Any) -> Any:
    """Return a state with None for what load_state_dict would take apart.

    It takes apart text, arrays and all that it can iterate over: _undo_casts() puts these there.
    """
    if isinstance(state, dict):
        return {key: leave_out_others(each) for key, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)([leave_out_others(each) for each in state])
    return state if is_tensor(state) or isinstance(state, int | float | complex) else None
