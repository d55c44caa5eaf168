"""`smp.amp`: the loss scale is the pipeline's, so a scaler only says whether a step counts."""

from __future__ import annotations

from typing import Any

from everstep.compat.smdistributed.modelparallel.torch.state import current_state


class GradScaler:
    """A stand-in for torch.cuda.amp.GradScaler. Losses are scaled, and gradients unscaled, by the pipeline; a step in
    which a gradient overflowed on any process changes nothing on all. The arguments are there for scripts' sake."""

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled

    def scale(self, outputs: Any) -> Any:
        """Return the loss as it is."""
        return outputs

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing: gradients are unscaled already."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step, unless a gradient overflowed."""
        model = current_state().model
        return None if model is not None and model.skipped else optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Do nothing: the scale follows the steps by itself."""

    def get_scale(self) -> float:
        """Return the factor by which losses are multiplied now; 1 without fp16."""
        model = current_state().model
        return float(model.engine.loss_scale.value) if model is not None and model.partitioned else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the scale is saved with the model."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the scale is loaded with the model."""
