"""`smp.DistributedOptimizer`: the script's optimizer, which after the partition has this process's parameters only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everstep.compat.smdistributed.modelparallel.torch.comm import CommGroup, allgather
from everstep.compat.smdistributed.modelparallel.torch.model import PARTIAL, DistributedModel, copy_to_cpu, merge_parts
from everstep.compat.smdistributed.modelparallel.torch.state import current_state

_DYNAMIC = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not where types are checked
    """Wraps an optimizer of the parameters of the smp.DistributedModel.

    Its state dictionaries number parameters as the wrapped optimizer did before the partition. With fp16 losses are
    scaled, always dynamically, whatever the arguments say; a step with an overflow changes nothing. With
    shard_optimizer_state each replica keeps the state of its share of them, and steps that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        unknown = [name for name in {**(dynamic_loss_args or {}), **more} if name not in _DYNAMIC]
        if unknown:
            raise TypeError(f"smp.DistributedOptimizer has no argument {unknown[0]!r}")
        now = current_state()
        if now.model is None:
            raise RuntimeError("wrap the model in smp.DistributedModel before its optimizer")
        self.optimizer = optimizer
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._groups = [[id(each) for each in group["params"]] for group in optimizer.param_groups]
        self._number = {id(each): index for index, each in enumerate(self._parameters)}
        self._pending: Mapping[str, Any] | None = None
        self._sharded: Any = None
        now.optimizers.append(self)
        if now.model.partitioned:
            self.after_partition(now.model, {})

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(self.optimizer.param_groups)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Return whether the last step has no gradients, since one overflowed."""
        model = current_state().model
        return model is not None and model.skipped

    @property
    def loss_scale(self) -> float:
        """Return the factor by which losses are multiplied; 1 but under fp16."""
        model = current_state().model
        return float(model.engine.loss_scale.value) if model is not None and model.partitioned else 1.0

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients of the whole model so that their norm is at most `max_norm`, and return what it was. All
        processes call it. torch.nn.utils.clip_grad_norm_ would see those of this process only."""
        model = current_state().model
        if model is None or not model.partitioned:
            raise RuntimeError("there are no gradients to clip yet: run a step first")
        if norm_type != 2.0:
            raise ValueError(f"norm_type is {norm_type}: only the norm 2 is offered")
        return float(model.engine.clip_gradients(max_norm))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: give the wrapped optimizer all groups before it is wrapped."""
        raise RuntimeError("smp.DistributedOptimizer: add parameter groups to the optimizer before it is wrapped")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def after_partition(self, model: DistributedModel, made: Mapping[Any, Any]) -> None:
        """Drop what other processes have, and take those that were `made` for parameters without data."""
        self._parameters = [made.get(each, each) for each in self._parameters]
        self._groups = [[id(made.get(each, each)) for each in group["params"]] for group in self.optimizer.param_groups]
        self._number = {id(each): index for index, each in enumerate(self._parameters)}
        for group in self.optimizer.param_groups:
            group["params"] = [made.get(each, each) for each in group["params"]]
        self._narrow({id(each) for each in model.local_parameters()})
        if is_sharded():
            from everstep.pipeline.engine.zero import ShardedOptimizer

            self._sharded = ShardedOptimizer(model.engine, self._mine)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.load_state_dict(pending)

    def _mine(self, named: Mapping[str, Any]) -> torch.optim.Optimizer:
        self._narrow({id(each) for each in named.values()})
        return self.optimizer

    def _narrow(self, own: set[int]) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in own]

    def step(self, closure: Any = None) -> Any:
        """Take a step. Raises RuntimeError with a closure: gradients come from the step function."""
        if closure is not None:
            raise RuntimeError("smp.DistributedOptimizer.step takes no closure")
        model = current_state().model
        if model is not None and model.skipped:
            return None
        return self.optimizer.step() if self._sharded is None else self._sharded.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also of those parameters that another replica steps."""
        self.optimizer.zero_grad(set_to_none)
        for each in self._parameters if self._sharded is not None else ():
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer's state, on all processes of the pipeline: all of them must call it. Raises
        RuntimeError with shard_optimizer_state, where no process has all of a stage."""
        if is_sharded():
            raise RuntimeError("with shard_optimizer_state there is no whole state: use local_state_dict")
        whole = self._own()
        if current_state().grid.ranks > 1:
            for part in allgather(copy_to_cpu(whole["state"]), CommGroup.PP_GROUP):
                whole["state"] = {**part, **whole["state"]}
        whole["state"] = dict(sorted(whole["state"].items()))
        return whole

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state of this process's parameters, marked as a part."""
        return {**self._own(), PARTIAL: True}

    def _own(self) -> dict[str, Any]:
        groups = []
        for group, members in zip(self.optimizer.param_groups, self._groups, strict=True):
            rest = {key: value for key, value in group.items() if key != "params"}
            groups.append({**rest, "params": [self._number[each] for each in members]})
        kept = {
            self._number[id(each)]: dict(value)
            for each, value in self.optimizer.state.items()
            if id(each) in self._number
        }
        return {"state": kept, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole or partial state, at once if the model is partitioned, else when it is."""
        model = current_state().model
        if model is None or not model.partitioned:
            self._pending = state_dict
            return
        for group, given in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        own = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        needed = [self._number[each] for each in own] if state_dict["state"] else []
        given = state_dict["state"] if is_sharded() else merge_parts(state_dict, needed, "state")
        for number, kept in given.items():
            parameter = self._parameters[int(number)]
            if id(parameter) in own:
                self.optimizer.state[parameter] = {
                    key: _copy_like(value, parameter, key) for key, value in kept.items()
                }


def is_sharded() -> bool:
    """Return whether replicas keep different parts of the state."""
    return current_state().config.shard_optimizer_state and current_state().grid.replicas > 1


def _copy_like(value: Any, parameter: Any, key: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if key == "step" else value.to(parameter.device, copy=True)
