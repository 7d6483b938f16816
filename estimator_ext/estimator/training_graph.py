"""The graph of a training on a ring: the step, its reductions, and the order of all hooks.

A session calls the hooks in this order. The stock Estimator puts the chief's hooks before the
others; the other ranks have no chief's hooks.

    chief                                   other ranks
    [K1] SessionGuardHook                   [K1] SessionGuardHook
    [K2] BeginStopSaveHook
    [K3] DesyncCheckHook
    [K4] CheckpointSaverHook, hooks of
         the model_fn for the chief,
         step counter, summaries
    [K5] BroadcastVariablesHook             [K5] BroadcastVariablesHook
    [K6] hooks of the input                 [K6] hooks of the input
    [K7] StepReportHook                     [K7] StepReportHook
                                            [K2] BeginStopSaveHook
                                            [K3] DesyncCheckHook
    [K8] hooks of `train`, NaN, logging     [K8] hooks of `train`, NaN, logging
    [K9] training hooks of the model_fn     [K9] training hooks of the model_fn
    [K10] accumulation                      [K10] accumulation
    [K11] InputStates                       [K11] InputStates
    [K12] ProgressHook
    [K13] EndStopSaveHook                   [K13] EndStopSaveHook
    [K14] LockedReadsHook (divided          [K14] LockedReadsHook
          updates), CopiesHook (on a GPU)         CopiesHook
    [K15] GlobalStepCheckHook               [K15] GlobalStepCheckHook

- K1 is first: no other hook may see an error that TensorFlow mistakes for the end of the data.
- K2 collects the states that K4 saves, and K3 checks the variables that K4 saves.
- K2 and K3 read global_step, which the chief has restored and the other ranks get in K5.
- K5 is before K6 and K8, which may read variables.
- K11 is after K6 and K8 to K10, which may initialize iterators or run the input.
- K13 is after all hooks that may request a stop.
- K14 and K15 read the graph, to which other hooks may add operations when they begin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

import hostopt
from estimator_ext import _tf_estimator
from estimator_ext._tf_private import listeners_of, loss_is_scaled
from estimator_ext.checkpoints.file_errors import translate_io_errors
from estimator_ext.checkpoints.reading import check_shapes, newest
from estimator_ext.checkpoints.saving import (
    add_saver,
    checked_saver,
    find_savers,
    has_own_saver,
    has_saver,
)
from estimator_ext.data_workers.service import data_service, prepared
from estimator_ext.estimator.accelerator_copies import CopiesHook
from estimator_ext.estimator.progress import (
    ProgressHook,
    StepReportHook,
    StepTimestamps,
    show_steps,
)
from estimator_ext.graphs.fingerprint import Updates, read_updates
from estimator_ext.graphs.global_step import read_before_changes
from estimator_ext.graphs.placement import move_updates
from estimator_ext.input.positions import BatchPosition
from estimator_ext.input.state import (
    KINDS,
    InputStates,
    log_limits,
    log_random_operations,
)
from estimator_ext.local_steps.hook import SyncHook
from estimator_ext.local_steps.replicas import Replicas, build_replicas, check_outer_slots
from estimator_ext.options import options_of
from estimator_ext.pipelines.sharding import dividing, few_files_refused
from estimator_ext.reduction.accumulation import Accumulation
from estimator_ext.reduction.divided_slots import DividedSlots
from estimator_ext.reduction.divided_updates import LARGE_BYTES, divide_updates
from estimator_ext.reduction.gradient_marks import MarkedGraph
from estimator_ext.reduction.gradient_reduction import GradientReduction
from estimator_ext.reduction.locked_reads import LockedReadsHook, Window
from estimator_ext.reduction.skipped_updates import HooksWithoutNan
from estimator_ext.reduction.uneven_data import (
    BatchWeights,
    Needs,
    check_endless,
    count_examples,
    has_next,
    needs_of,
    repeat_last_batch,
)
from estimator_ext.reduction.unreduced_updates import (
    check_mended,
    mend_unreduced_updates,
    warn_of_local_variables,
)
from estimator_ext.session.coordinated_stop import BeginStopSaveHook, Coordinated, EndStopSaveHook
from estimator_ext.session.guard import SessionGuardHook
from estimator_ext.session.hooks import BroadcastVariablesHook
from estimator_ext.session.preemption import PreemptionHook
from estimator_ext.spec import operations_of_step, stock_spec
from estimator_ext.strategy.devices import is_gpu
from estimator_ext.strategy.strategy import HostOffloadStrategy
from estimator_ext.variables.desync import DesyncCheckHook
from estimator_ext.variables.sync_on_read import SyncOnRead
from hostopt.collectives.communicator import all_gather_json


class ModelFunctions(NamedTuple):
    """Functions of an Estimator that build parts of the graph."""

    call_input_fn: Callable[[tf.distribute.InputContext], Any]
    is_sharded: bool  # input_fn itself shards the data, as it takes an input context
    create_global_step: Callable[[tf.Graph], tf.Variable]
    call_model_fn: Callable[[Any, Any], Any]  # returns a stock spec


@dataclass(eq=False)
class TrainingGraph:
    """The graph of a training and its hooks."""

    strategy: HostOffloadStrategy
    reduction: GradientReduction
    config: Any
    model_dir: str | None  # None on a rank without files
    hooks: Sequence[Any]  # of `train`
    restored: str | None = None  # checkpoint that the chief restores
    spec: Any = None  # stock spec of the step, with hooks of the chief and of all ranks
    first_hooks: list[Any] = field(default_factory=list)  # to call before those of `train`
    global_step: tf.Variable | None = None
    input_states: Any = None

    def __post_init__(self) -> None:
        self._communicator = self.strategy.communicator
        self._is_chief = self.strategy.cluster.is_chief
        self._steps_per_run = options_of(self.config).iterations_per_loop

    def build(self, functions: ModelFunctions, stack: contextlib.ExitStack) -> None:
        """Builds the step and its hooks in the default graph. Collective.

        The stack receives the scopes of the savers and of the data workers, as long as it trains.
        """
        graph = tf.compat.v1.get_default_graph()
        cluster, device = self.strategy.cluster, self.strategy.own_device
        device.check_alone(cluster, self._communicator, self.config.session_config)
        separate = self._communicator.duplicate("the data")
        inputs = build_input(
            self.strategy, self.reduction, self.config, functions, separate, stack
        )
        data = set(graph.get_operations())
        guard = SessionGuardHook(data, self.strategy.options.collective_timeout_s)  # [K1]
        states = self.input_states = InputStates(
            separate, lambda: guard.data_have_ended, inputs.has_next, inputs.batches
        )
        self.global_step = functions.create_global_step(graph)
        graph.watch(self.reduction, data, self.strategy.extended.loss_is)
        self.spec = self.strategy.extended.call_for_each_replica(
            functions.call_model_fn, args=(inputs.features, inputs.labels)
        )
        graph.marks_gradients = False
        updates, suspects = self._reduce(data)
        divided, windows = self._divide_updates()
        stack.callback(divided.close)
        stack.enter_context(divided.explain())
        replicas = build_replicas(self.strategy, self.spec, data)
        copies = self._copies()
        stamps = StepTimestamps(self.spec, self.reduction.values.weights)
        self.first_hooks = [
            BroadcastVariablesHook(self._communicator, divided),  # [K5]
            *inputs.hooks,  # [K6]
            *self._step_report(stamps),  # [K7]
        ]
        progress = self._progress(stamps)
        if self.reduction.accumulation is not None:
            self.reduction.accumulation.finish()
            self._add_training_hooks(self.reduction.accumulation)  # [K10]
        if self.model_dir is not None:  # now, as input_fn or model_fn may have saved one
            self.restored = newest(self.model_dir)
        if self.restored is not None and not has_own_saver(self.spec):
            check_shapes(self.restored, tf.compat.v1.global_variables())
            check_outer_slots(self.restored)
        states.restored = self.restored
        self._add_training_hooks(states)  # [K11]
        self._prepare_savers(states, data, stack)
        if self._is_chief and progress.is_needed:
            for saver in find_savers(self._all_hooks()):
                listeners_of(saver).insert(0, progress.saves)
            self._add_training_hooks(progress)  # [K12]
        coordination: list[Any] = []
        if updates is not None or replicas is not None:
            coordination = [self._coordinate(states, divided, replicas, stamps.examples)]  # [K2]
        if updates is not None:
            self._communicator.check_same(updates.texts, "the updates of variables")
            whole = [v for v in updates.mirrored if v.op.name not in divided.names]
            coordination += self._desync_checks(whole, suspects)  # [K3]
        self._order_first_hooks(guard, coordination)
        reads = [LockedReadsHook(windows)] if windows else []
        self._add_training_hooks(*reads, *copies)  # [K14]

    def _reduce(self, data: Collection[tf.Operation]) -> tuple[Updates | None, Mapping[str, str]]:
        """Builds the reductions of the step.

        Returns the updates of variables in the step, None for a single rank; and, by name of a
        variable, a description of the values in its updates that may differ by rank.
        """
        graph, reduction = tf.compat.v1.get_default_graph(), self.reduction
        targets = operations_of_step(self.spec)
        updates, suspects, is_mean = None, {}, loss_is_scaled()
        read_before_changes(targets)
        if reduction.uses_gradients_of_graph:
            # factors that make the terms of a loss parts of the ranks
            data = {*data, *graph.scale_factors, *graph.penalties.factors.values()}
            data.update(graph.nonlinear.weights.values())
            updates = read_updates(targets, data, reduction.sums)
            if mend_unreduced_updates(reduction, updates, data):
                updates = read_updates(targets, data, reduction.sums)
            is_mean = reduction.decide_loss(self.spec.loss, is_mean)
            if self.strategy.options.nonfinite == "skip":
                reduction.skipping.check(updates)
        if reduction.size == 1:
            updates = None  # there are no other ranks to compare with
        elif updates is not None:
            suspects = check_mended(updates, data)
            warn_of_local_variables(updates)
        self._check_accumulation()
        loss = self.spec.loss
        if reduction.accumulation is not None:
            loss = reduction.accumulation.mean(loss, "loss")
        loss, last = reduction.build_step(targets, updates, loss, is_mean)
        if self.strategy.extended.variables_on_host:
            sums = [*reduction.deferred.gradients, *(op.outputs[0] for op in reduction.sums)]
            losses = [self.spec.loss, *graph.targets]
            move_updates(targets, losses, sums, self.strategy.accelerator)
        # the step waits for all reductions, and fails at the end of the data
        train_op = tf.group(self.spec.train_op, *last) if last else self.spec.train_op
        self.spec = stock_spec(self.spec, loss=loss, train_op=train_op)
        return updates, suspects

    def _divide_updates(self) -> tuple[DividedSlots, list[Window]]:
        least_bytes = self._bytes_to_divide()
        if least_bytes is None:
            return DividedSlots(self._communicator), []
        targets = operations_of_step(self.spec)
        windows, slots = divide_updates(targets, self._communicator, self.reduction, least_bytes)
        ends = [each.end for each in windows]
        self.spec = stock_spec(self.spec, train_op=tf.group(self.spec.train_op, *ends))
        return slots, windows

    def _bytes_to_divide(self) -> int | None:
        """Returns the size of updates from which the ranks divide them; None for never.

        Collective: all ranks must call it.
        """
        divides, communicator = self.strategy.options.shard_optimizer, self._communicator
        if divides is not None:
            return 0 if divides and communicator.size > 1 else None
        if not communicator.on_one_host or self.strategy.local_steps.is_used:
            return None
        has_gpu = all_gather_json(communicator, is_gpu(self.strategy.accelerator))
        return None if any(has_gpu) else LARGE_BYTES

    def _check_accumulation(self) -> None:
        accumulation = self.reduction.accumulation
        if accumulation is not None and not accumulation.is_used:
            raise hostopt.ConfigError(
                f"accumulate_steps is {accumulation.micro_batches}, but the step updates no "
                "variable with a gradient that is computed outside of branches, loops and "
                "functions. Compute gradients outside of them, or leave accumulate_steps out"
            )

    def _copies(self) -> list[CopiesHook]:
        """Makes the step wait for the renewal of copies, which the hook builds."""
        device = self.strategy.accelerator
        if not is_gpu(device) or self._steps_per_run > 1:
            return []
        pins = not self.config.session_config.gpu_options.force_gpu_compatible
        hook = CopiesHook(self.spec, device, pins)
        self.spec = stock_spec(self.spec, train_op=tf.group(self.spec.train_op, hook.renewed))
        return [hook]

    def _step_report(self, stamps: StepTimestamps) -> list[StepReportHook]:
        """Reports on the reducers; there are none with one rank, or without buckets."""
        reducers = tuple(self.reduction.reducers)  # a hook may add more, not run in each step
        timeline = self._communicator.transport.timeline
        if not reducers:
            return []
        if timeline is not None:
            self.spec = show_steps(self.spec, stamps, reducers, timeline)
        communicator = self._communicator.duplicate("step reports")
        return [StepReportHook(communicator, reducers, self.config, self.model_dir)]

    def _progress(self, stamps: StepTimestamps) -> ProgressHook:
        accumulation = self.reduction.accumulation
        fetches = {"loss": self.spec.loss, "examples": stamps.examples}
        if accumulation is None:  # otherwise most batches of a step have runs of their own
            fetches.update(stamps.times)
        if self._steps_per_run > 1:
            fetches = {}  # the parts of a loop cannot be fetched
        reports = (hook for hook in self.first_hooks if isinstance(hook, StepReportHook))
        return ProgressHook(
            fetches,
            next(reports, None),
            self._communicator.size * (accumulation.micro_batches if accumulation else 1),
            self.hooks,
            self.model_dir or "",
            self.config.save_summary_steps or 0,
        )

    def _prepare_savers(
        self, states: InputStates, data: Collection[tf.Operation], stack: contextlib.ExitStack
    ) -> None:
        """Adds the saver of the stock class, so that other hooks can come before it: [K4]."""
        for hook in self.hooks:
            if isinstance(hook, PreemptionHook):
                hook.saves = has_saver(self.spec, self.hooks, self.config)
        if self.model_dir is None:
            return
        self.spec = add_saver(self.spec, self.hooks, self.config, self.model_dir)
        savers = find_savers(self._all_hooks())
        for saver in savers:
            stack.enter_context(checked_saver(saver, self.restored))
        states.listen(savers)
        log_random_operations(self.spec.train_op, data)

    def _desync_checks(
        self, mirrored: Sequence[tf.Variable], suspects: Mapping[str, str]
    ) -> list[DesyncCheckHook]:
        every_steps = self.strategy.options.desync_check_steps
        if not every_steps:
            return []
        separate = self._communicator.duplicate("the variables of the ranks")
        steps_per_run = self._steps_per_run
        return [DesyncCheckHook(separate, mirrored, every_steps, steps_per_run, suspects)]

    def _coordinate(
        self,
        states: InputStates,
        divided: DividedSlots,
        replicas: Replicas | None,
        examples: tf.Tensor,
    ) -> BeginStopSaveHook | SyncHook:
        """Coordinates stops and saves: adds [K13] and returns [K2]."""
        communicator, hooks = self._communicator, self._all_hooks()
        separate = communicator.duplicate("variables that are synchronised when they are read")
        sync_on_read = SyncOnRead(separate, tf.compat.v1.global_variables())
        stops = EndStopSaveHook(communicator, self.reduction.flags, hooks)
        self._add_training_hooks(stops)
        savers = find_savers(hooks)
        coordinated = Coordinated(self.reduction.flags, sync_on_read, divided, states, savers)
        coordinated.coordinate_saves()
        if replicas is None:
            return BeginStopSaveHook(communicator, coordinated)
        local = (self.strategy, replicas, stops, examples, self.config, hooks)
        return SyncHook(communicator.duplicate("states of the ranks"), coordinated, *local)

    def _order_first_hooks(self, guard: SessionGuardHook, coordination: Sequence[Any]) -> None:
        if self._is_chief:
            chief_hooks = [guard, *coordination, *self.spec.training_chief_hooks]
            self.spec = stock_spec(self.spec, training_chief_hooks=chief_hooks)
        else:
            self.first_hooks = [guard, *self.first_hooks, *coordination]
        if self.strategy.options.nonfinite != "error":
            self.first_hooks = HooksWithoutNan(self.first_hooks)

    def _all_hooks(self) -> list[Any]:
        """Hooks of `train` and of the spec on this rank."""
        chief_hooks = self.spec.training_chief_hooks if self._is_chief else ()
        return [*self.hooks, *self.spec.training_hooks, *chief_hooks]

    def _add_training_hooks(self, *hooks: Any) -> None:
        self.spec = stock_spec(self.spec, training_hooks=[*self.spec.training_hooks, *hooks])


@contextlib.contextmanager
def build(
    strategy: HostOffloadStrategy,
    config: Any,
    model_dir: str | None,
    hooks: Sequence[Any],
    functions: ModelFunctions,
) -> Iterator[TrainingGraph]:
    """Builds the graph of a training, which is the default graph within the block.

    Collective: all ranks must enter it. An error in the block ends the training on all ranks.
    """
    with (
        MarkedGraph().as_default(),
        strategy.extended.training_graph() as reduction,
        translate_io_errors(model_dir),
        contextlib.ExitStack() as stack,
    ):
        tf.compat.v1.set_random_seed(config.tf_random_seed)
        training = TrainingGraph(strategy, reduction, config, model_dir, hooks)
        training.build(functions, stack)
        yield training


# -- the input of a step: the data of this rank, and the weight of each batch --------------------


class TrainingInput(NamedTuple):
    """Tensors and hooks of the input of a training."""

    features: Any
    labels: Any
    hooks: list[Any]  # that initialize the iterators
    has_next: tf.Tensor  # of bool, reads a batch; False or OutOfRangeError if the data have ended
    batches: BatchPosition | None  # None if the batches are not counted


def build_input(
    strategy: HostOffloadStrategy,
    reduction: GradientReduction,
    config: Any,
    functions: ModelFunctions,
    separate: hostopt.Communicator,
    stack: contextlib.ExitStack,
) -> TrainingInput:
    """Builds the input of a training step, with its accumulation and weights. Collective.

    The stack receives scopes in which the data workers are watched and errors are explained.
    """
    communicator = strategy.communicator
    kind = options_of(config).resume_data
    communicator.check_same({"resume_data": repr(kind)}, "the configurations of the ranks")
    batches = None if kind == KINDS[0] else BatchPosition(separate)
    watch = stack.enter_context(data_service(strategy, config))
    if watch is None:
        stack.enter_context(few_files_refused())
        data = _share_of_rank(strategy, config, functions)
    else:  # its workers divide the data
        context = tf.distribute.InputContext(1, 0, strategy.num_replicas_in_sync)
        data = functions.call_input_fn(context)
    if communicator.rank == 0:
        log_limits(data, communicator.size, is_counted=batches is not None)
    micro_batches = options_of(config).accumulate_steps
    needs = Needs(weights=False, join=False)
    if communicator.size > 1 and not reduction.is_local:
        needs = needs_of(data, communicator, config.session_config)
        if watch is not None and not needs.join:
            check_endless(data, config.session_config)
    if watch is not None:
        data = prepared(data, strategy, config, watch)
    is_new: Any = True
    if needs.join:
        # each element is (batch, is_new); the stock function returns them as features and labels
        batch, is_new, hooks = _tf_estimator.parse_input_fn_result(repeat_last_batch(data))
    else:
        *batch, hooks = _tf_estimator.parse_input_fn_result(data)
    if batches is not None:
        batch, is_new = batches.counted((batch, is_new), is_new)
    counts = count_examples(batch, is_new) if needs.weights else []
    if micro_batches > 1:
        accumulation = reduction.accumulation = Accumulation(micro_batches, *counts[:1])
        if counts:
            counts = [accumulation.all_examples, accumulation.total(counts[1], "batches")]
    if counts:
        weights = BatchWeights(counts[0], counts[1], communicator, options_of(config).uneven_data)
        reduction.values.weights = weights
        if needs.join and reduction.accumulation is None:  # compute nothing without data
            with tf.control_dependencies([weights.mean_weight]):
                batch = tf.nest.map_structure(tf.identity, batch)
    features, labels, _ = _tf_estimator.parse_input_fn_result(batch)
    more = is_new if needs.join else has_next((features, labels))
    hooks = hooks if watch is None else [watch, *hooks]
    return TrainingInput(features, labels, hooks, more, batches)


def _share_of_rank(strategy: HostOffloadStrategy, config: Any, functions: ModelFunctions) -> Any:
    communicator, context = strategy.communicator, strategy.extended.input_context()
    if communicator.size == 1 or functions.is_sharded:
        return functions.call_input_fn(context)
    policy = strategy.extended.auto_shard
    with dividing(communicator, context, policy, config.session_config) as divide:
        return divide(functions.call_input_fn(context))
