"""Sums of gradients over the ranks, and of other values, in one graph.

This module decides what is reduced, and by which weight. `hostopt.tensorflow` reduces it.
docs/architecture.md shows the way of a gradient, [G1] to [G7].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import loss_is_scaled, replace_input
from estimator_ext.graphs.fingerprint import Updates
from estimator_ext.graphs.walks import data_before, depends_on
from estimator_ext.losses.kind import LossKind
from estimator_ext.reduction.accumulation import Accumulation
from estimator_ext.reduction.deferred import DeferredReductions
from estimator_ext.reduction.gradient_marks import Mark, mark_of, marked_graph
from estimator_ext.reduction.skipped_updates import SkippedUpdates
from estimator_ext.reduction.uneven_data import BatchWeights
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import AnyReducer
from hostopt.tensorflow import ops
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.reductions import Reduction, reduce_tensors
from hostopt.tensorflow.sparse import map_values, set_shape_of, values_of

_log = tf.get_logger()

# A tensor or `tf.IndexedSlices`, the name of its variable, and the shape of a row.
Gradient = tuple[Any, str, tuple[int, ...]]


@dataclass(eq=False)
class ValueReduction:
    """Reduces tensors that are not gradients of variables: norms, counts and the loss.

    A reduction has the gradient of an `all_reduce`: the cotangents of all ranks, reduced in the
    same way. If the ranks' batches differ in size, each rank's loss counts by its examples.
    """

    strategy: Any
    deferred: DeferredReductions
    weights: BatchWeights | None = None  # None if each rank counts 1
    _loss_weight: tf.Tensor | None = None

    def weight(self, is_mean: bool) -> tf.Tensor | None:
        """Returns the factor of this rank's gradients and loss in a step; None if all count 1."""
        if self.weights is None:
            return None
        return self.weights.mean_weight if is_mean else self.weights.sum_weight

    @property
    def share(self) -> Any:
        """1 / number of ranks that take part in a sum: a number, or a tensor if their data end."""
        return 1 / self.strategy.cluster.size if self.weights is None else self.weights.share

    def reduce(self, tensor: tf.Tensor, name: str, is_mean: bool) -> tf.Tensor:
        """Reduces a tensor over the ranks, differentiably if its dtype is floating."""
        if not tensor.dtype.is_floating:
            return self._reduce(tensor, name, is_mean)

        @tf.custom_gradient
        def reduce(value: tf.Tensor) -> Any:
            def gradient(cotangent: Any) -> tf.Tensor:
                return self._reduce_cotangent(cotangent, f"{name}/gradient", is_mean)

            return self._reduce(value, name, is_mean), gradient

        with tf.device(HOST_DEVICE):
            return reduce(tensor)

    def _reduce_cotangent(self, cotangent: Any, name: str, is_mean: bool) -> tf.Tensor:
        cotangent = tf.convert_to_tensor(cotangent)
        if self.weights is None:
            return self.reduce(cotangent, name, is_mean)
        # Each rank's loss counts by its examples, so its cotangent is weighted before the sum.
        # The gradients computed from the result are multiplied by this rank's weight later, so the
        # result is divided by it.
        if self._loss_weight is None:  # of means, until `weigh_loss` connects the right one
            weight = self.weights.mean_weight
            with weight.graph.as_default(), tf.control_dependencies(None), tf.device(HOST_DEVICE):
                self._loss_weight = tf.raw_ops.PlaceholderWithDefault(input=weight, shape=[])
        weight = tf.cast(self._loss_weight, cotangent.dtype)
        total = self.reduce(tf.math.multiply_no_nan(cotangent, weight), name, is_mean)
        return tf.math.divide_no_nan(total, weight)

    def _reduce(self, tensor: tf.Tensor, name: str, is_mean: bool) -> tf.Tensor:
        with tf.control_dependencies([] if self.weights is None else [self.weights.mean_weight]):
            tensor = tf.identity(tensor)  # nothing travels in a step without data
        op = hostopt.ReduceOp.SUM
        if is_mean and tensor.dtype.is_floating:
            op, is_mean = hostopt.ReduceOp.AVERAGE, False
        is_deferred = self.deferred.can_take([tensor])
        if is_deferred and tensor.shape.is_fully_defined():
            total = self.deferred.add(Reduction(tensor, name, op, is_gradient=False))
        else:
            total = ops.all_reduce(tensor, self.strategy.communicator, op, name)
            if is_deferred:
                self.deferred.built.append(total)
        size = tf.cast(self.strategy.cluster.size, total.dtype)
        return tf.math.divide(total, size) if is_mean else total

    def weigh_loss(self, loss: tf.Tensor, is_mean: bool) -> tf.Tensor:
        """Multiplies the loss by this rank's weight, once; by 0 it becomes 0, also from NaN."""
        weight = self.weight(is_mean)
        if weight is None:
            return loss
        if self._loss_weight is not None:
            replace_input(self._loss_weight.op, 0, weight)
        factor = tf.cast(weight, loss.dtype)
        return tf.where(tf.equal(factor, 0), tf.zeros_like(loss), loss * factor)

    def reduce_loss(self, loss: tf.Tensor, is_mean: bool, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """Reduces the weighted loss of the step.

        A float32 scalar is sent at once and read after the gradients, so no rank waits for it.
        """
        if after and loss.dtype == tf.float32 and loss.shape.rank == 0:
            communicator, flags = self.strategy.communicator, self.deferred.flags
            total = ops.start_scalar_sum(loss, "the loss", communicator, after, flags)
            return total / self.strategy.cluster.size if is_mean else total
        return self._reduce(loss, "the loss", is_mean)


@dataclass(eq=False)
class GradientReduction:
    """Reduces the gradients of one graph, and holds all state of its reductions.

    Args:
      at_backward: True for programs that do not know of ranks: gradients are reduced to those of
        one process. An optimizer reduces those that come straight from backward. All others, such
        as clipped or accumulated ones, are reduced where they leave backward, as soon as the step
        is complete (`unreduced_updates`).
    """

    strategy: Any
    sparse_as_dense: bool
    at_backward: bool = False
    graph: tf.Graph | None = None
    accumulation: Accumulation | None = None
    skipping: SkippedUpdates = field(default_factory=SkippedUpdates)
    flags: ops.StopSaveFlags = field(default_factory=ops.StopSaveFlags)
    model_knows_size: str = ""  # the place where the program reads the number of ranks
    has_divided: bool = False  # True once a loss is computed as in one process
    reducers: list[AnyReducer] = field(default_factory=list)  # to be closed with the graph
    sums: set[tf.Operation] = field(default_factory=set)  # of micro-batches of a single rank
    _losses: dict[LossKind, None] = field(default_factory=dict)  # whose gradients are reduced
    # sums by variable, not to be reduced again
    _reduced: dict[Any, tf.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_local = self.strategy.local_steps.is_used  # nothing is reduced in a step
        self.size = 1 if self.is_local else self.strategy.cluster.size
        graph = self.graph if self.size > 1 else None
        self.deferred = DeferredReductions(self.strategy, graph, self.flags)
        self.values = ValueReduction(self.strategy, self.deferred)

    @property
    def uses_gradients_of_graph(self) -> bool:
        """True if the gradients of the training graph must be known (`gradient_marks`)."""
        is_alone = self.size == 1 and self.accumulation is None
        return not is_alone or self.strategy.options.nonfinite == "skip"

    @property
    def follows_gradients(self) -> bool:
        """True if gradients are reduced to those of one process, whoever applies them."""
        return self.at_backward and not self.model_knows_size and self.uses_gradients_of_graph

    def close(self) -> None:
        """Ends the threads of the reducers."""
        for reducer in self.reducers:
            reducer.close()
        self.reducers.clear()

    # -- the step ---------------------------------------------------------------------------

    def build_step(
        self,
        targets: Sequence[tf.Operation],
        updates: Updates | None,
        loss: tf.Tensor,
        is_mean: bool,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Builds the deferred reductions and that of the loss; collective.

        Returns:
          The reduced loss, and tensors that are available after all reductions of the step and
          fail at the end of the data.
        """
        loss = self.values.weigh_loss(loss, is_mean)
        deferred, weights = self.deferred, self.values.weights
        if updates is None:
            return loss, []
        loss = tf.reshape(loss, [])  # the static shape may be unknown, or [1] as in TensorFlow
        op = hostopt.ReduceOp.AVERAGE if is_mean else hostopt.ReduceOp.SUM
        reduction = Reduction(loss, "the loss", op, is_gradient=False)
        ends = [] if weights is None else [weights.mean_weight]
        targets = [*targets, *(tensor.op for tensor in ends)]
        repeated = [] if self.accumulation is None else self.accumulation.additions
        refuse_reductions_of_some_ranks(updates)
        if weights is not None:
            deferred.refuse_before(repeated)
        self._add_reducers(deferred.build(targets, updates.is_same, reduction, repeated))
        total = deferred.loss
        if total is None:  # it needs messages of its own
            total = self.values.reduce_loss(loss, is_mean, deferred.last_results)
        return total, [*deferred.last_results, *ends]

    # -- gradients --------------------------------------------------------------------------

    def reduce_now(
        self, pairs: Sequence[tuple[Any, tf.Variable]], nonfinite: str | None
    ) -> list[Any]:
        """Sums gradients; the next `reduce_pairs` passes on what is computed from the sums."""
        sums = self.reduce_pairs(tf.distribute.ReduceOp.SUM, pairs, nonfinite)
        self._reduced.update((v.ref(), values_of(total)) for total, (_, v) in zip(sums, pairs))
        return sums

    def reduce_pairs(
        self,
        reduce_op: tf.distribute.ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        nonfinite: str | None = None,
    ) -> list[Any]:
        """Reduces those gradients that have not been reduced yet: [G2] to [G5]."""
        results = [value for value, _ in pairs]
        for value, variable in pairs:
            if isinstance(variable, tf.Variable):
                set_shape_of(value, variable.shape)
        left = [i for i, pair in enumerate(pairs) if not self._take_reduced(*pair)]
        follows = self.follows_gradients and marked_graph() is not None
        if follows:  # the others are reduced where they leave backward
            left = [i for i in left if mark_of(results[i]) is not None]
        gradients = [(results[i], *_name_and_row_shape(pairs[i][1], results[i])) for i in left]
        if follows:
            marks = [mark for each, *_ in gradients if (mark := mark_of(each)) is not None]
            sums = self.reduce_marked(gradients, marks, nonfinite)
        else:
            sums = self.sum_gradients(gradients, loss_is_scaled(), nonfinite)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                with tf.device(HOST_DEVICE):
                    sums = [map_values(lambda v: v / self.size, total) for total in sums]
        for i, total in zip(left, sums):
            results[i] = total
        return results

    def _take_reduced(self, gradient: Any, variable: Any) -> bool:
        """Returns True if a gradient is computed from a sum of `reduce_now`, which counts once."""
        reference = variable.ref() if isinstance(variable, tf.Variable) else None
        total = self._reduced.pop(reference, None)
        if total is None:
            return False
        values = values_of(gradient)
        if values.graph is not total.graph:  # a branch has its own graph: assume that it is
            return True
        return depends_on([values.op], [total.op], data_before)

    def sum_gradients(
        self, gradients: Sequence[Gradient], is_mean: bool, nonfinite: str | None = None
    ) -> list[Any]:
        """Sums dense and sparse gradients over the ranks."""
        if not gradients:
            return []
        values, names = [value for value, *_ in gradients], [name for _, name, _ in gradients]
        if self.sparse_as_dense or self.accumulation is not None:
            values = [tf.convert_to_tensor(value) for value in values]
        if self.accumulation is not None:
            values = [self.accumulation.mean(v, name) for v, name in zip(values, names)]
        if self.size == 1:
            check = NonFiniteCheck(self.strategy.communicator, nonfinite, is_local=True)
            self.skipping.checks.append(check)
            sums = ops.check_gradients(values, names, self.strategy.communicator, check)
            if self.accumulation is not None:
                self.sums.update(total.op for total in sums)
        else:
            reductions = [
                Reduction(value, name, row_shape=row_shape, sums_rows=False)
                for value, (_, name, row_shape) in zip(values, gradients)
            ]
            sums = self._sum(reductions, self.values.weight(is_mean), nonfinite)
        if (nonfinite or self.strategy.options.nonfinite) == "skip":
            self.skipping.watch([values_of(total) for total in sums])
        return sums

    def _sum(
        self, reductions: Sequence[Reduction], weight: tf.Tensor | None, nonfinite: str | None
    ) -> list[Any]:
        if self.deferred.can_take([each.value for each in reductions]):
            return [self.deferred.add(each, weight, nonfinite) for each in reductions]
        communicator = self.strategy.communicator
        sums, reducers = reduce_tensors(reductions, communicator, weight, nonfinite)
        self._add_reducers(reducers)
        return sums

    def _add_reducers(self, reducers: Sequence[AnyReducer]) -> None:
        self.reducers += reducers
        self.skipping.checks += [reducer.nonfinite_check for reducer in reducers]

    # -- gradients by the kinds of their losses -----------------------------------------------

    def reduce_marked(
        self,
        gradients: Sequence[Gradient],
        marks: Sequence[Mark],
        nonfinite: str | None = None,
        device: str = HOST_DEVICE,
    ) -> list[Any]:
        """Reduces gradients to their mean over the ranks, or to the sum if their loss is a sum."""
        for mark in dict.fromkeys(marks):
            self._check_loss(mark)
        kinds = [(mark.loss.is_sum, mark.is_scaled) for mark in marks]
        results: list[Any] = [None] * len(marks)
        for is_sum, is_scaled in sorted(set(kinds)):
            chosen = [i for i, kind in enumerate(kinds) if kind == (is_sum, is_scaled)]
            sums = self.sum_gradients([gradients[i] for i in chosen], not is_sum, nonfinite)
            if not (is_sum or is_scaled):
                with tf.device(device):
                    sums = [map_values(lambda each: each / self.size, total) for total in sums]
            for i, total in zip(chosen, sums):
                results[i] = total
        return results

    def _check_loss(self, mark: Mark) -> None:
        graph, loss = marked_graph(), mark.loss
        if loss.problem and self.size > 1:
            text, remedy = loss.problem
            raise hostopt.ConfigError(
                f"{self.size} ranks are to train like one process, but a loss {text}. {remedy}"
            )
        if graph is not None:
            graph.penalties.divide(loss, self.values.share)
            mean = functools.partial(self.values.reduce, is_mean=True)
            graph.nonlinear.set(loss.nonlinear, self.size, mean, self.values.weights)
        self._losses[loss] = None

    def decide_loss(self, loss: tf.Tensor, is_mean: bool) -> bool:
        """Decides how the reported loss is reduced, and logs what is a mean and what is a sum."""
        for each in self._losses if self.size > 1 else ():
            kind = "sum" if each.is_sum else "mean"
            text = "gradients are the %s over %d ranks, as the loss is a %s over the batch: %s"
            log = _log.warning if each.warns else _log.info
            log(text, kind, self.size, kind, each.reason)
        graph = marked_graph()
        if graph is None or not self._losses:
            return is_mean
        reported = graph.loss_kind([loss])
        graph.penalties.divide(reported, self.values.share)
        return not reported.is_sum


def refuse_reductions_of_some_ranks(updates: Updates) -> None:
    """Checks that all ranks make the reductions in branches and loops in the same steps.

    Such a reduction is built at once, in the graph of its branch. Ranks that take different
    branches would pair values of different steps, or wait for each other until a timeout.
    """
    for op, predicates in updates.reductions:
        differing = next((each for each in predicates if not updates.is_same(each)), None)
        if differing is not None:
            if differing.op.type == "LoopCond":  # of a TensorFlow 1 loop
                differing = differing.op.inputs[0]
            raise hostopt.ConfigError(
                f"reduction {op.name!r} is made only if predicate {differing.name!r} of a branch "
                "or loop says so, which may differ by rank. Reduce before the branch, as with "
                "estimator_ext.reduce_gradients, or choose the branch by a value that is reduced, "
                "as with tf.distribute.get_replica_context().all_reduce"
            )


def _name_and_row_shape(variable: Any, gradient: Any) -> tuple[str, tuple[int, ...]]:
    is_variable = isinstance(variable, tf.Variable)
    name = variable.op.name if is_variable else values_of(gradient).op.name
    if not isinstance(gradient, tf.IndexedSlices):
        return name, ()
    shape = variable.shape if is_variable else gradient.shape
    for row in (shape[1:], gradient.values.shape[1:]):
        if row.is_fully_defined():
            return name, tuple(row.as_list())
    raise hostopt.ConfigError(
        f"the gradient of {name!r} is sparse, and {name!r} is of shape {shape}, wanted one whose "
        "rows have a known shape. Create the variable with a static shape"
    )
