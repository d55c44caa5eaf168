"""The modules of a model as it is cut: a stage runs parts of it by itself, and sees no change of what holds them.

A module that is never cut is called as it is, with what it holds then. Of all others a stage has a list of what to
call. So another module in the place of one of theirs, another tensor in the place of a buffer, a hook or another
`forward` is seen wherever the cut falls, and a step after it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.skeleton import Drawing, Skeleton

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OURS = "everstep.pipeline."


@dataclass(eq=False, slots=True)
class _HeldParts:
    """The content of one module: its modules, parameters and buffers, its own `forward`, and hooks.

    All of it is referred to weakly: who has dropped the whole model, and other processes train most of it, has that
    memory back, and can change nothing of it any more.
    """

    path: str
    module: Callable[[], Any]
    names: list[tuple[str, str]]
    parts: list[Callable[[], Any]]
    forward: Callable[[], Any]
    hooks: int

    def check(self) -> None:
        """Compare it with what it was; PipelineError if it is another."""
        module = self.module()
        if module is None:
            return
        now = _list_parts(module)
        if len(now) != len(self.parts) or not all(map(is_, now, (part() for part in self.parts))):
            raise _make_error(self.path, module, self._find_change(module))
        if vars(module).get("forward") is not self.forward():
            raise _make_error(self.path, module, "has another forward")
        if sum(1 for _ in _iterate_hooks(module)) != self.hooks:
            raise _make_error(self.path, module, "has other hooks")

    def _find_change(self, module: nn.Module) -> str:
        before = dict(zip(self.names, (part() for part in self.parts), strict=True))
        now = dict(zip(_list_names(module), _list_parts(module), strict=True))
        for kind, name in (*before, *now):
            if before.get((kind, name)) is not now.get((kind, name)):
                return f"has another {kind} {name!r}"
        return "has its parts in another order"


class FixedModules:
    """The modules of a model whose code a cut may open, as they are when it is cut.

    Args:
        model: The model.
        paths: Of these modules.
    """

    def __init__(self, model: nn.Module, paths: Collection[str] = ()) -> None:
        self._held = [_hold(path, model.get_submodule(path)) for path in sorted(paths)]

    def watch(self, run: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Look at what stands for the model and for such modules in these stages too: a script may change it there."""
        self._held.append(_hold("", run))
        for part in dict.fromkeys(parts):
            for path, module in part.named_modules():
                if isinstance(module, Skeleton):
                    self._held.append(_hold(path, module))

    def check(self) -> None:
        """Compare all of them with what they were.

        Raises:
            PipelineError: If one is another, with its name and what has changed.
        """
        for each in self._held:
            each.check()


def _hold(path: str, module: nn.Module) -> _HeldParts:
    hooks = sum(1 for _ in _iterate_hooks(module))
    parts, forward = list(map(_refer_to, _list_parts(module))), _refer_to(vars(module).get("forward"))
    return _HeldParts(path, _refer_to(module), _list_names(module), parts, forward, hooks)


def _refer_to(held: Any) -> Callable[[], Any]:
    """Return what gives it, or None when it is gone."""
    return weakref.ref(held) if held is not None else _give_none


def _give_none() -> None:
    return None


def _list_parts(module: nn.Module) -> list[Any]:
    return [*module._modules.values(), *module._parameters.values(), *module._buffers.values()]


def _list_names(module: nn.Module) -> list[tuple[str, str]]:
    kinds = (("module", module._modules), ("parameter", module._parameters), ("buffer", module._buffers))
    return [(kind, name) for kind, held in kinds for name in held]


def _iterate_hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module that are not a pipeline's own."""
    for name in _HOOKS:
        for hook in getattr(module, name).values():
            if not type(getattr(hook, "__self__", None)).__module__.startswith(_OURS):
                yield hook


def _make_error(path: str, module: nn.Module, change: str) -> PipelineError:
    where = f"module {path!r}" if path else "the model"
    kind = "" if isinstance(module, Skeleton | Drawing) else f" ({type(module).__name__})"
    return PipelineError(
        f"{where}{kind} {change} than when pipeline() cut the model, of which its stages would see nothing, or see it "
        "only where the cut falls elsewhere: change the model before, and call pipeline() again; change buffers in "
        "place (copy_, fill_); put hooks on modules that have no modules in them"
    )
