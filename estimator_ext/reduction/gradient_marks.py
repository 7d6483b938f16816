"""A graph that marks gradients when TensorFlow computes them.

This module wraps `tf.gradients` and `tf.GradientTape.gradient` for the whole process. In a
`MarkedGraph`, each gradient becomes the output of a new identity operation, and the graph stores
the source with respect to which it was computed. In other graphs the wrappers change nothing.

The static number of rows of a sparse gradient is hidden, because a reduction changes it.

An optimizer of `tf.compat.v1.train` scales its loss unless the last loss function of the graph was
a sum. In a `MarkedGraph` only loss functions on which the loss depends count. DeepCTR, for
example, computes metrics with loss functions. In a program that does not know of ranks the graph
of the loss says if it is a mean or a sum (`losses.kind`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import (
    Optimizer,
    control_flow_context,
    gradients_module,
    is_reference,
)
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.losses.kind import MEAN, SUM, LossKind, Penalties, kind_of, last_reduction
from estimator_ext.losses.nonlinear import NonlinearTerms
from estimator_ext.losses.reader import LossReader
from hostopt.tensorflow._tf_private import outermost
from hostopt.tensorflow.ops import is_same_on_all_ranks
from hostopt.tensorflow.sparse import parts_of, set_shape_of, values_of

_NAME = "HostGradient"


@dataclass(frozen=True, eq=False)
class Mark:
    """One gradient."""

    gradient: Any
    source: tf.Tensor  # or the handle of the variable, with respect to which it was computed
    name: str  # of the variable, or of the gradient if the source is not a variable
    row_shape: tf.TensorShape  # of a sparse gradient
    is_scaled: bool  # True if an optimizer has divided the target by the number of ranks
    loss: LossKind
    targets: tuple[tf.Operation, ...]  # that compute the loss


class MarkedGraph(tf.Graph):
    """A graph that stores its gradients, its losses, and the factors that scale them."""

    def __init__(self) -> None:
        super().__init__()
        self.marks_gradients = False
        self._reduction: str | None = None  # of the last loss, which TensorFlow reads
        self._loss_functions: dict[str, str] = {}  # reductions, by the scope of their operations
        self.marks: dict[tf.Operation, Mark] = {}
        self.targets: list[tf.Tensor] = []  # of all gradients, also of those without a mark
        self._loss_is_scaled = False
        self.scale_factors: list[tf.Operation] = []  # 1 / size, one for each scaled loss
        self._reader: LossReader | None = None
        self.penalties, self.nonlinear = Penalties(), NonlinearTerms()

    @property
    def _is_loss_scaled_by_optimizer(self) -> bool:
        return self._loss_is_scaled

    @_is_loss_scaled_by_optimizer.setter
    def _is_loss_scaled_by_optimizer(self, is_scaled: bool) -> None:
        self._loss_is_scaled = is_scaled
        if is_scaled:  # set right after the multiplication
            self.scale_factors.append(self.get_operations()[-1].inputs[1].op)

    @property
    def _last_loss_reduction(self) -> str | None:
        return self._reduction

    @_last_loss_reduction.setter
    def _last_loss_reduction(self, reduction: str | None) -> None:
        self._reduction = reduction
        if reduction is not None:  # set within the scope of the loss
            is_sum = reduction == tf.compat.v1.losses.Reduction.SUM
            self._loss_functions[self.get_name_scope()] = SUM if is_sum else reduction

    def reduce_as(self, loss: tf.Tensor) -> None:
        """Makes the reduction of a loss the last one of the graph, for TensorFlow."""
        kind = self.loss_kind([loss]) if self.reads_losses else None
        if kind is None or kind.problem:
            self._reduction = last_reduction([loss], self._loss_functions) or self._reduction
        else:
            self._reduction = SUM if kind.is_sum else MEAN

    @property
    def reads_losses(self) -> bool:
        """True if the graph of a loss says if it is a mean or a sum."""
        return self._reader is not None

    def watch(self, reduction: Any, data: Collection[tf.Operation], said: str) -> None:
        """Stores the gradients that are computed from now on."""
        self.marks_gradients = reduction.uses_gradients_of_graph
        if reduction.at_backward:
            is_weighted = reduction.values.weights is not None
            # a divisor would be exchanged for each micro-batch, but the ends of data once a step
            weighs = not (is_weighted and reduction.accumulation is not None)
            self.read_losses(data, reduction.size, said, is_weighted, weighs)

    def read_losses(
        self,
        data: Collection[tf.Operation],
        size: int,
        said: str = "",
        weighted: bool = False,
        weighs: bool = True,
    ) -> None:
        """Reads the graphs of losses from now on, in a program that does not know of ranks."""
        functions, marks = self._loss_functions, self.marks
        self._reader = LossReader(data, functions, marks, size, said, weighted, weighs)

    def loss_kind(
        self, targets: Sequence[Any], weights: Sequence[Any] = (), can_divide: bool = True
    ) -> LossKind:
        """Returns the kind of a loss, whose graph can still be changed if `can_divide`."""
        if self._reader is None:
            is_sum = last_reduction([*targets, *weights], self._loss_functions) == SUM
            return LossKind(is_sum, "of its last loss function")
        tensors = [each.op for each in weights if isinstance(each, tf.Tensor)]
        before = walk(tensors, lambda op: [] if op in self.marks else data_before(op))
        passed_on = [self.marks[op].loss for op in before if op in self.marks]
        if passed_on:
            return passed_on[0]
        kind = kind_of(targets, self._reader, can_divide)
        self.penalties.prepare(kind)
        self.nonlinear.prepare(kind.nonlinear)
        return kind

    def is_scaled(self, targets: Sequence[Any]) -> bool:
        """Returns True if targets depend on a loss that an optimizer has divided by the ranks.

        The search ends at updates of variables and at results of reductions.
        """

        def before(op: tf.Operation) -> list[tf.Operation]:
            assigns = any(map(is_reference, op.inputs))
            ends = assigns or op in self.marks or is_same_on_all_ranks(op)
            return [] if ends else data_before(op)

        operations = walk([each.op for each in targets if isinstance(each, tf.Tensor)], before)
        factors = set(self.scale_factors)
        return any(
            op in factors or (op in self.marks and self.marks[op].is_scaled) for op in operations
        )


def marked_graph() -> MarkedGraph | None:
    """Returns the graph around the default one that stores gradients; None if there is none."""
    graph = outermost(tf.compat.v1.get_default_graph())
    return graph if isinstance(graph, MarkedGraph) else None


def marks_of_graph() -> dict[tf.Operation, Mark]:
    """Returns the marks of `marked_graph` by operation, two for each sparse gradient."""
    graph = marked_graph()
    return {} if graph is None else graph.marks


def mark_of(gradient: Any) -> Mark | None:
    """Returns the mark of a gradient that comes straight from backward, in this branch or loop."""
    op, marks = values_of(gradient).op, marks_of_graph()
    while op.type == "Identity" and op not in marks:
        op = op.inputs[0].op
    graph = tf.compat.v1.get_default_graph()
    is_here = op.graph is graph and control_flow_context(op) is control_flow_context(graph)
    return marks.get(op) if is_here else None


def _marked(
    graph: MarkedGraph, gradient: Any, source: Any, targets: Any, is_scaled: bool, loss: LossKind
) -> Any:
    if not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):  # None, or a composite tensor
        return gradient
    if not isinstance(source, (tf.Tensor, tf.Variable)):
        return gradient
    row_shape = tf.TensorShape([])
    with tf.device(gradient.device):
        if isinstance(gradient, tf.IndexedSlices):
            row_shape = gradient.values.shape[1:]
            if not row_shape.is_fully_defined() and source.dtype != tf.resource:
                row_shape = source.shape[1:]
            values = _hiding_rows(gradient.values, row_shape)
            indices = _hiding_rows(gradient.indices, [])
            gradient = tf.IndexedSlices(values, indices, gradient.dense_shape)
        else:
            gradient = tf.identity(gradient, name=_NAME)
            if source.dtype != tf.resource:
                set_shape_of(gradient, source.shape)
    name = values_of(gradient).op.name
    if isinstance(source, tf.Variable):
        source, name = source.op.outputs[0], source.op.name
    operations = tuple(each.op for each in targets if isinstance(each, tf.Tensor))
    mark = Mark(gradient, source, name, row_shape, is_scaled, loss, operations)
    graph.marks.update({part.op: mark for part in parts_of(gradient)})
    return gradient


def _hiding_rows(tensor: tf.Tensor, row_shape: Any) -> tf.Tensor:
    shape = tf.TensorShape([None]).concatenate(row_shape)
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape, name=_NAME)


def _marking_graph() -> MarkedGraph | None:
    """Returns the graph that stores the gradients which are computed now.

    Those in functions are stored only if losses are read, as they are not reduced elsewhere.
    """
    graph = None if tf.executing_eagerly() else marked_graph()
    if graph is None or not graph.marks_gradients:
        return None
    is_inside = tf.compat.v1.get_default_graph() is not graph
    return None if is_inside and not graph.reads_losses else graph


def _note_targets(targets: Any) -> None:
    graph = None if tf.executing_eagerly() else marked_graph()
    if graph is not None:
        tensors = (each for each in tf.nest.flatten(targets) if isinstance(each, tf.Tensor))
        graph.targets += [each for each in tensors if each.graph is graph]


def _mark_results_of_gradients(helper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(helper)
    def gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        _note_targets(ys)
        graph = _marking_graph()
        if graph is None or kwargs.get("src_graph") is not None:  # of a branch or a loop
            return helper(ys, xs, *args, **kwargs)
        targets = tf.nest.flatten(ys)
        weights = tf.nest.flatten([args[:1], kwargs.get("grad_ys")])
        loss = graph.loss_kind(targets, weights)  # first, as it may change the loss
        results = helper(ys, xs, *args, **kwargs)
        is_scaled = graph.is_scaled([*targets, *weights])
        sources = xs if isinstance(xs, (list, tuple)) else [xs]
        return [_marked(graph, g, x, targets, is_scaled, loss) for g, x in zip(results, sources)]

    return gradients


def _mark_results_of_tape(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        _note_targets(target)
        results, graph = method(self, target, sources, *args, **kwargs), _marking_graph()
        if graph is None:
            return results
        targets = tf.nest.flatten(target)
        weights = tf.nest.flatten([args, list(kwargs.values())])
        loss = graph.loss_kind(targets, weights, can_divide=False)  # the tape has seen it
        is_scaled = graph.is_scaled([*targets, *weights])
        pairs = zip(tf.nest.flatten(results), tf.nest.flatten(sources))
        marked = [_marked(graph, g, x, targets, is_scaled, loss) for g, x in pairs]
        return tf.nest.pack_sequence_as(results, marked)

    return gradient


def _scale_by_reduction(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(scale)
    def scale_loss(loss: Any) -> Any:
        graph = marked_graph()
        if graph is not None and isinstance(loss, tf.Tensor):
            if loss.graph is graph:
                graph.reduce_as(loss)
            elif graph.reads_losses:  # in a function, whose gradients are divided instead
                return loss
        return scale(loss)

    return scale_loss


Optimizer._scale_loss = staticmethod(_scale_by_reduction(Optimizer._scale_loss))
gradients_module._GradientsHelper = _mark_results_of_gradients(gradients_module._GradientsHelper)
tf.GradientTape.gradient = _mark_results_of_tape(tf.GradientTape.gradient)
