"""The interpreter: does what the schedule's list of this rank says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from everstep.coordination.heartbeat import Heartbeat
from everstep.pipeline.engine.agreement import (
    ACCUMULATE,
    CLIP,
    EVALUATE,
    TRAIN,
    Disagreement,
    Moment,
    Reads,
    Word,
    agree_on_batch,
    agree_on_call,
    inspect_batch,
)
from everstep.pipeline.engine.batchnorm import RunningStatistics
from everstep.pipeline.engine.casts import forget_casts_of_script, forget_stale_casts, share_casts
from everstep.pipeline.engine.checks import check_arguments
from everstep.pipeline.engine.clipping import clip_gradients
from everstep.pipeline.engine.losses import Loss, LossPart, Total, compute_loss
from everstep.pipeline.engine.mail import P2PMessenger
from everstep.pipeline.engine.metrics import average_metrics
from everstep.pipeline.engine.microbatch import Parts, compute_bounds, lend_targets, select_arguments, split_batch
from everstep.pipeline.engine.nested import StageValue
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.overlap import last_backwards
from everstep.pipeline.engine.parameter_hooks import call_hooks
from everstep.pipeline.engine.parameters import Parameters
from everstep.pipeline.engine.result_uses import ResultUses
from everstep.pipeline.engine.rng import Random
from everstep.pipeline.engine.scaling import LossScale, Scaled, scale_to_mean_loss
from everstep.pipeline.engine.stage import Listen, Ran, RunnableStage, StageRunner
from everstep.pipeline.engine.step_result import StepResult
from everstep.pipeline.engine.values import Gradients, Values
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.autocast import autocast_of, casting_to
from everstep.pipeline.frontend.gradients import has_hooks, without_hooks
from everstep.pipeline.frontend.skeleton import name_modules
from everstep.pipeline.graph import StageGraph
from everstep.pipeline.schedules import Action, ActionKind, Schedule
from everstep.pipeline.schedules.flow import Flow
from everstep.pipeline.transport.base import Transport, TransportError

_NOTHING = contextlib.nullcontext()


class Engine:
    """One rank of a pipeline: `stages` are its own, of those that `schedule` places, with the edges of `stage_graph`.

    `loss(output, targets)` runs on the last stage; see `losses.evaluate`. All ranks construct it together.
    PipelineError if schedule, graph and stages do not fit, or the schedule is not proven.
    """

    def __init__(
        self,
        stages: Mapping[int, RunnableStage],
        schedule: Schedule,
        stage_graph: StageGraph,
        transport: Transport,
        loss: Loss,
        options: EngineOptions | None = None,
    ) -> None:
        self.options = options = options or EngineOptions()
        self.transport, self.schedule, self.rank = transport, schedule, transport.rank
        check_arguments(stages, schedule, stage_graph, transport, options)
        self._flow = flow = Flow(stage_graph, schedule.placement)
        transport.connect(flow.links)
        self._last = schedule.stages - 1
        self._loss = loss if self._last in stages else None  # it may refer to the whole model
        self._world = transport.group(range(transport.size), replicas=True)
        self.data = [transport.group([rank], replicas=True) for rank in range(transport.size)][self.rank]
        self.parameters = Parameters(stages, stage_graph, schedule.placement, transport, self.data, options)
        if options.broadcast:
            self.parameters.synchronise()
        modules = name_modules(stage.module for stage in stages.values())
        self._random = Random(modules, transport.device, options.seed)
        self._statistics, self.results = RunningStatistics(modules.values()), ResultUses()
        self._stages = {
            index: StageRunner(
                index,
                module,
                {edge.value: edge.gradient for edge in flow.inputs[index]},
                {edge.value: edge.gradient for edge in flow.outputs[index]},
                partial(self._around, index),
                self._loss_of if index == self._last else None,
                recompute=options.recomputes(index),
            )
            for index, module in stages.items()
        }
        self._mail = P2PMessenger(transport, schedule.placement, options.ahead, options.dynamic)
        self._readers, self.reads = self._who_reads(stages)
        self._plans: dict[tuple[int, bool, bool], tuple[tuple[Action, bool], ...]] = {}
        written = {name for stage in stages.values() for name in getattr(stage, "writes", ())}
        self._writes_weights = not written.isdisjoint(self.parameters.named)
        self._versions = 0  # of the weights, when low-precision copies of them were made
        self.loss_scale = LossScale(options.loss_scale, True) if options.precision == "fp16" else LossScale()
        self.steps = self.progress = self.passes = 0  # optimizer steps; for who watches, actions done and what all do
        self.watch: Heartbeat | None = None  # who knows better what an error of the transport means
        self.least, self._total = 1, Total()  # samples of a micro-batch, where a batch has as many
        self._batches, self._training, self._closed = 0, True, ""  # why
        self._inputs, self._targets, self._sizes = list[Any](), list[Any](), list[int]()

    def step(self, batch: Mapping[str, Any] | Parts | None, targets: Any = None, *, last: bool = True) -> StepResult:
        """Forward and backward of one batch of this replica; then parameters have the gradients of the mean loss.

        `batch` has the model's arguments by name; a rank needs those in `reads` only. With `last=False` the gradients
        of several batches are added up, and the step ends with the first call without it. Gradients from before it are
        dropped. PipelineError on all ranks if they do not agree on it; after other errors the engine is of no use.
        """
        self._require_open()
        forget_casts_of_script()
        if not self._batches:
            self.parameters.forget_gradients()
            self._total = Total(results=self.results.begin())
        with self.aborting():
            casts = share_casts(is_wanted=self.options.precision != "full")
            with without_hooks(self.parameters.own), casts, self._random.kept():
                self._pass(batch, targets, TRAIN if last else ACCUMULATE, reduce=last)
            self._batches = 0 if last else self._batches + 1
            return self._finish() if last else self._hold()

    def evaluate(self, batch: Mapping[str, Any] | Parts | None, targets: Any = None) -> StepResult:
        """Forward only, without gradients, in whatever mode the modules are; without targets no loss is computed."""
        self._require_open()
        if self._batches:
            raise PipelineError("a step still accumulates batches: end it with step(…, last=True) before an evaluation")
        self._total = Total()
        forget_casts_of_script()
        with self.aborting(), torch.no_grad():
            outputs = self._pass(batch, targets, EVALUATE, reduce=False)
            self._commit_statistics()  # of layers that are in training, as to find them anew for averaged weights
            self._total.drew = self._random.drew_in_evaluation
            scaled = scale_to_mean_loss([], [], self._total, self._sum, LossScale(), None, self.transport.device)
            self._random.end_evaluation(drew=scaled.drew)
        return StepResult(scaled.loss, scaled.count, self._metrics(scaled), outputs=outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs beside weights and optimizer; it is the same on all ranks."""
        return {"steps": self.steps, "loss_scale": self.loss_scale.value, "good": self.loss_scale.good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; a step that is under way is dropped."""
        self.steps = self._random.step = state["steps"]
        self._batches, self.loss_scale.value, self.loss_scale.good = 0, state["loss_scale"], state["good"]

    def is_adding_up(self, parameters: Iterable[Any]) -> bool:
        """Tell whether these have gradients of a step that has begun, and that further batches are to end."""
        return self._batches > 0 and not self._closed and self.parameters.held.are_of(parameters)

    def _require_open(self) -> None:
        if self._closed:
            raise PipelineError(f"the pipeline was closed: {self._closed}")

    def close(self, reason: str = "its modules are the model's again") -> None:
        """Take the engine's hooks off the modules, of which another engine may then be made; steps raise the reason."""
        if self._closed:
            return
        self._closed = reason
        self.parameters.narrow_gradients()
        self._random.close()
        self._statistics.close()

    def _pass(self, batch: Any, targets: Any, purpose: str, *, reduce: bool) -> tuple[Any, ...]:
        """All actions of one batch; the model's outputs, of an evaluation."""
        self._training, self.passes = purpose != EVALUATE, self.passes + 1
        if self._training and not isinstance(batch, PipelineError):
            try:
                self.parameters.check_frozen(first=not self._batches)
            except PipelineError as error:
                batch = error
        step = self.steps, self._batches, purpose
        mine: Word | Moment = step
        if self.rank in self._readers:
            mine = inspect_batch(self.reads, step, batch, targets, self.options.unsplit_inputs)
        samples, signature = agree_on_batch(self.transport, mine, self._readers, self._frozen(purpose))
        if isinstance(batch, PipelineError):
            raise batch  # this rank tells nothing of a batch, and no other saw anything wrong
        self._cut(batch, targets, samples)
        actions = self._plan(len(self._sizes), reduce)
        self._mail.begin([action for action, _ in actions], signature)
        self._values = Values(self._flow, self.rank)
        outputs: dict[int, Any] = {}  # a schedule may take micro-batches in any order
        for action, reduces in actions:
            self._mail.post_ahead()
            listen = partial(self.parameters.reduction.listen, action.stage) if reduces else None
            self._do(action, outputs, listen)
            self.progress += 1
        self._mail.end()
        self.transport.settle()
        assert self._values.empty(), "a value was computed that no action used"
        return tuple(outputs[microbatch] for microbatch in sorted(outputs))

    def _do(self, action: Action, outputs: dict[int, Any], listen: Listen | None) -> None:
        kind, index, microbatch = action.kind, action.stage, action.microbatch
        if kind is ActionKind.FORWARD:
            ran = self._forward(index, microbatch)
            if ran.loss is not None:
                self._total.add(ran.loss)
            if index == self._last and not self._training:
                outputs[microbatch] = ran.output
        elif kind is ActionKind.SEND:
            self._send(action)
        elif kind is ActionKind.RECEIVE:
            self._mail.receive(action)
        elif kind is ActionKind.WEIGHT_GRAD:
            with self._once_more(index, microbatch):
                self._stages[index].weight_grad(microbatch, listen)
        elif kind is ActionKind.REDUCE:
            self.parameters.reduction.reduce(index)
        elif kind is ActionKind.TIE:
            for name in self.parameters.ties_of(action):
                self.parameters.reduction.tie(name)
        else:
            stage = self._stages[index]
            given, loss_scale = self._given(index, microbatch), self.loss_scale.value
            with self._once_more(index, microbatch):
                if kind is ActionKind.BACKWARD:
                    found = stage.backward(microbatch, given, loss_scale, listen)
                else:
                    found = stage.input_grad(microbatch, given, loss_scale)
            for name, gradients in found.items():
                self._values.add_gradients(name, microbatch, gradients)

    def _forward(self, index: int, microbatch: int) -> Ran:
        stage = self._stages[index]
        values: dict[str, StageValue] = {}
        for name in stage.edges:
            if not self._values.has(name, microbatch):
                self._values.put(name, microbatch, self._mail.value(name, microbatch))
            values[name] = self._values.use(name, microbatch)
        inputs = self._inputs[microbatch] if stage.arguments else {}
        ran = stage.forward(microbatch, values, inputs, train=self._training)
        for edge in self._flow.outputs[index]:
            value = ran.values[edge.value]
            self._mail.made(edge.value, microbatch, value.layout)
            self._values.put(edge.value, microbatch, value)
        return ran

    def _send(self, action: Action) -> None:
        name, microbatch = action.value, action.microbatch
        if action.gradient:
            gradients = self._values.take_gradients(name, microbatch, self._mail.layout(name, microbatch))
            self._mail.send(action, gradients)
        else:
            self._mail.send(action, self._values.use(name, microbatch).tensors)

    def _given(self, index: int, microbatch: int) -> dict[str, Gradients]:
        """The gradients of what a stage has made, from all that used it."""
        given: dict[str, Gradients] = {}
        for edge in self._flow.outputs[index]:
            if edge.gradient:
                for gradients in self._mail.gradients(edge.value, microbatch):
                    self._values.add_gradients(edge.value, microbatch, gradients)
                layout = self._mail.layout(edge.value, microbatch)
                given[edge.value] = self._values.take_gradients(edge.value, microbatch, layout)
        return given

    def _hold(self) -> StepResult:
        """After a batch that does not end its step: one process has updated its statistics by now."""
        self._commit_statistics()
        self.parameters.hold_gradients()
        return StepResult(float("nan"), 0.0)

    def _finish(self) -> StepResult:
        self.parameters.reduction.finish()
        self._total.differentiated = sum(each.take_differentiated() for each in self._stages.values())
        self._commit_statistics()
        counted, own, device = self.parameters.counted_here, self.parameters.own, self.transport.device
        call = partial(call_hooks, self.parameters.by_original_name, self._random.of_hooks)
        hooks, narrow = call if any(map(has_hooks, own)) else None, self.parameters.narrow_gradients
        clip, add = self.options.clip, partial(self.parameters.copies.add_up, self._sum, self.steps)
        scaled = scale_to_mean_loss(own, counted, self._total, add, self.loss_scale, clip, device, hooks, narrow)
        narrow()
        self.steps += 1
        self._random.next_step()
        return StepResult(scaled.loss, scaled.count, self._metrics(scaled), scaled.norm, scaled.skipped)

    def _commit_statistics(self) -> None:
        def reduce(sums: Any) -> None:
            if self.transport.replicas > 1:
                self.transport.all_reduce(sums, self.data).wait()

        self._statistics.commit(reduce, self.transport.replica, self.transport.replicas)

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Any:
        """Clip the gradients of a step by the norm of those of all ranks. See `clipping.clip_gradients`."""
        self._require_open()
        if self._batches:
            raise PipelineError("a step still accumulates batches: end it with step(…, last=True) before clipping")
        self.passes += 1
        place, counted = self.transport.replica * self.transport.size + self.rank, self.parameters.counted_here

        def gather(vector: Any) -> Any:
            every = vector.new_zeros(self.transport.size * self.transport.replicas, len(vector))
            every[place] = vector
            self._sum(every)
            return every

        with self.aborting(), torch.no_grad():
            agree_on_call(self.transport, (self.steps, 0, CLIP), self._readers)
            own, device, strict = self.parameters.own, self.transport.device, error_if_nonfinite
            return clip_gradients(own, counted, gather, device, max_norm, norm_type, error_if_nonfinite=strict)

    def _frozen(self, purpose: str) -> str:
        """Return what replicas must agree on about the parameters that do not learn."""
        return self.parameters.frozen if purpose != EVALUATE and self.transport.replicas > 1 else ""

    def _sum(self, tensor: Any) -> None:
        self.transport.all_reduce(tensor, self._world).wait()

    def _metrics(self, scaled: Scaled) -> dict[str, float]:
        if self._last not in self._stages:
            return {}
        return average_metrics(self._total.metrics, scaled.count, scaled.metrics, self.transport, self.data)

    def _cut(self, batch: Any, targets: Any, samples: int) -> None:
        count, unsplit_inputs, least = self.schedule.microbatches, self.options.unsplit_inputs, self.least
        self._sizes = [stop - start for start, stop in compute_bounds(samples, count, least)]
        inputs = select_arguments(batch, self.reads.inputs) if self.reads.inputs else {}
        self._inputs = split_batch(inputs, samples, count, unsplit_inputs, least) if inputs else []
        has_targets = self.reads.targets and targets is not None
        self._targets = split_batch(targets, samples, count, least=least) if has_targets else []

    def _loss_of(self, microbatch: int, output: Any) -> LossPart | None:
        if not self._targets or self._loss is None:
            return None
        targets = lend_targets(self._targets[microbatch], copied=self.options.recomputes(self._last))
        compute = partial(compute_loss, self._loss, output, targets, self._sizes[microbatch], self.options.loss_weight)
        return self.results.note(output, compute)

    def _of_all(self, microbatch: int) -> int:
        """The number of a micro-batch among those of all replicas and of all batches of the step."""
        batch = self._batches * self.transport.replicas + self.transport.replica
        return microbatch + batch * self.schedule.microbatches

    @contextlib.contextmanager
    def _once_more(self, index: int, microbatch: int) -> Iterator[None]:
        """Around a backward, in which a model's own activation checkpoints do parts of its forward again."""
        self._statistics.begin(count=False)
        try:
            with self._random.again(self._of_all(microbatch), self._stages[index].repeats, index):
                yield
        finally:
            self._statistics.end()

    @contextlib.contextmanager
    def _around(self, index: int, microbatch: int, again: bool) -> Iterator[None]:
        drawing = self._random.of if self._training else self._random.of_evaluation
        self._statistics.begin(count=not again)
        try:
            with (
                drawing(self._of_all(microbatch), self._stages[index].repeats, index),
                self._casting(),
                self._offloading(index),
            ):
                yield
        finally:
            self._statistics.end()

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward: what the precision casts to."""
        if self.options.precision == "full":
            return _NOTHING
        known = None if self._writes_weights else self._versions
        self._versions = forget_stale_casts(self.parameters.own, known)
        kind = self.transport.device.type
        return casting_to(autocast_of(self.options.precision, kind), kind)

    def _offloading(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Around a forward: where what its backward needs is kept."""
        if not self._training or index not in self.options.offload:
            return _NOTHING
        pinned = self.transport.device.type == "cuda"
        offloading: contextlib.AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu(pin_memory=pinned)
        return offloading

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """Around what waits for others: when it fails, all hear why, and nobody waits for this rank.
        RankLost in the place of a TransportError, if somebody was lost."""
        try:
            yield
        except Disagreement:
            raise  # nothing was begun, on any rank
        except BaseException as error:
            for stage in self._stages.values():
                stage.clear()
            lost = self.watch.explain() if self.watch is not None and isinstance(error, TransportError) else None
            if self.watch is not None and lost is None:
                self.watch.fail(error)
            self.transport.abort(f"rank {self.rank} of replica {self.transport.replica} failed: {error}")
            if lost is not None:
                raise lost from error
            raise

    def _plan(self, microbatches: int, reduce: bool) -> tuple[tuple[Action, bool], ...]:
        """The actions of this rank, without those of micro-batches that a small batch does not have; of each, whether
        it begins to reduce gradients."""
        key = microbatches, reduce, self._training
        if key not in self._plans:
            backward = {ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD}
            actions = tuple(
                action
                for action in self.schedule.ranks[self.rank]
                if action.microbatch < microbatches
                and (reduce or action.kind not in (ActionKind.REDUCE, ActionKind.TIE))
                and (self._training or (action.kind not in backward and not action.gradient))
            )
            last = last_backwards(actions)
            self._plans[key] = tuple((action, action in last) for action in actions)
        return self._plans[key]

    def _who_reads(self, stages: Mapping[int, RunnableStage]) -> tuple[list[int], Reads]:
        """The ranks that read, the same on all; what this one reads."""
        arguments = {name for stage in self._stages.values() for name in stage.arguments}
        mine = Reads(frozenset(arguments), self._last in stages)
        marks = torch.zeros(self.transport.size, dtype=torch.float64, device=self.transport.device)
        marks[self.rank] = float(bool(mine.inputs) or mine.targets)
        self._sum(marks)
        return [rank for rank in range(self.transport.size) if marks[rank]], mine
