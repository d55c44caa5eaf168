"""Gradients between the batches of one step, which are sums that nobody has scaled yet.

A step divides by what all of its batches count. A script that clears these gradients in between takes the sums of the
first batches away, and not what they count; one that steps an optimizer steps by sums over micro-batches.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from everstep.pipeline.errors import PipelineError

_log = logging.getLogger("everstep.pipeline")
_FEW = 8  # parameters, the smallest ones


class HeldGradients:
    """The gradients that the batches of a step have left, and how often each was written."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, Any, int]] = []

    def hold(self, parameters: Mapping[str, Any]) -> None:
        """Remember the gradients of these parameters, after a batch that does not end its step."""
        self._held = [(each, each.grad, 0 if each.grad is None else each.grad._version) for each in parameters.values()]

    def release(self) -> None:
        """Forget them, before a step begins."""
        self._held = []

    def are_of(self, parameters: Iterable[Any]) -> bool:
        """Tell whether one of these parameters still has the gradient that a batch has left."""
        given = {id(each) for each in parameters}
        return any(
            gradient is not None and id(each) in given and each.grad is gradient for each, gradient, _ in self._held
        )

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Compare them with what the parameters have now.

        Args:
            parameters: The same parameters by their names.

        Raises:
            PipelineError: If one was cleared, replaced or written, with the name of its parameter.
        """
        for parameter, gradient, version in self._held:
            now = parameter.grad
            if now is gradient and (now is None or now._version == version):
                continue
            name = next((name for name, each in parameters.items() if each is parameter), "")
            raise PipelineError(
                f"the gradient of parameter {name!r} was {'cleared' if now is None else 'changed'} between the batches "
                "of one step, as by optimizer.zero_grad(): until the step ends it is a sum, and the step still divides "
                "by what all of its batches count. End a step with step(…, last=True), also with the last batch of an "
                "epoch, and change gradients after it; a step drops the gradients from before it by itself"
            )


class UnusedGradients:
    """The gradients of the first step, of which a second step tells whether anything has used them.

    In one process gradients are added up until a script clears them, so a loop that steps its optimizer after every
    fourth batch only is a usual one. A step of a pipeline drops the gradients from before it: such a loop would train
    on each fourth batch.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, int]] | None = None
        self._values: list[tuple[Any, Any]] = []
        self._is_used = self._is_done = False
        self._handle: Any = None

    def _listen(self, learning: Iterable[Any]) -> None:
        """Hear of optimizers that step: one with a rate of 0, as at the start of a warm-up, may change nothing."""
        known, me = set(map(id, learning)), weakref.ref(self)

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            held = me()
            if held is not None and any(
                id(each) in known for group in optimizer.param_groups for each in group["params"]
            ):
                held._is_used = True

        self._handle = register_optimizer_step_post_hook(note)
        weakref.finalize(self, self._handle.remove)

    def look(self, parameters: Iterable[Any]) -> None:
        """Look, when a step begins, at what the one before has left. It warns in the second step, if at all.

        Args:
            parameters: Those of this rank.
        """
        if self._is_done:
            return
        learning = [each for each in parameters if each.requires_grad]
        if self._before is None:
            self._before = [(each, each._version) for each in learning]
            smallest = sorted(learning, key=lambda each: int(each.numel()))[:_FEW]
            self._values = [(each, each.detach().clone()) for each in smallest]
            self._listen(learning)
            return
        self._is_done = True
        self._handle.remove()
        known, values, self._before, self._values = self._before, self._values, None, []
        # By their values too: what is written by `.data` has no version.
        unused = not self._is_used and any(each.grad is not None and bool(each.grad.any()) for each, _ in values)
        if unused and all(each._version == version for each, version in known):
            unused = all(bool((each.detach() == before).all()) for each, before in values)
            if unused:
                _log.warning(
                    "the first step has left gradients that no optimizer has used, and the second drops them: to add "
                    "up several batches, call step(…, last=False) for all of them but the last; and make the optimizer "
                    "of run.groups(): that of a model which was built without weights has none of its parameters"
                )
