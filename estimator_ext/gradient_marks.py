"""Marks on gradients, set where TensorFlow computes them.

`tf.gradients` and `tf.GradientTape.gradient` are wrapped, once and for all. In a `TrainingGraph`
each of their results becomes the output of an operation of its own, of which the graph knows with
respect to what the gradient was computed. Anywhere else the wrappers change nothing.

The number of rows of a sparse gradient is hidden: behind a reduction it is another one.

An optimizer of `tf.compat.v1.train` scales its loss unless the last loss function of the graph has
made a sum. In a `TrainingGraph` that is the last one of which its loss is made: a metric that is
computed with a loss function, as DeepCTR's are, has no say in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import backprop
from tensorflow.python.ops import gradients_util
from tensorflow.python.training.optimizer import Optimizer

from estimator_ext.graph import data_before, walk
from estimator_ext.operation_kinds import OF_THIS_RANK
from hostopt.tensorflow.ops import is_same_on_all_ranks

__all__: list[str] = []

_NAME = "HostGradient"
_NO_REDUCTION, _SUM = "none", "sum"  # as Keras says it, too
_MEAN = tf.compat.v1.losses.Reduction.MEAN
_DIVISIONS = ("RealDiv", "Div", "DivNoNan")
_PRODUCTS = ("Mul", "MulNoNan")


@dataclass(frozen=True, eq=False)
class Mark:
    """One gradient.

    Args:
      gradient: a tensor, or a sparse gradient.
      source: with respect to what it was computed: a tensor, or the handle of a variable.
      name: of the variable, or of the gradient itself.
      row_shape: of a sparse gradient, the shape of one row.
      is_scaled: whether an optimizer has divided by the number of ranks what was differentiated.
      is_sum: whether that is a loss function's sum over the examples.
    """

    gradient: Any
    source: tf.Tensor
    name: str
    row_shape: tf.TensorShape
    is_scaled: bool
    is_sum: bool

    @property
    def parts(self) -> list[tf.Tensor]:
        """The tensors that a reduction changes."""
        gradient = self.gradient
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return [gradient.values, gradient.indices] if is_sparse else [gradient]


class TrainingGraph(tf.Graph):
    """A graph that knows its gradients, its losses, and the factors that scale them."""

    def __init__(self) -> None:
        super().__init__()
        self.marks_gradients = False
        self._reduction: str | None = None  # as TensorFlow knows it: of the last loss
        self._reductions: dict[str, str] = {}  # of each loss, by the scope of its operations
        self.marks: dict[tf.Operation, Mark] = {}
        self._loss_is_scaled = False
        self.scale_factors: list[tf.Operation] = []  # 1 / size, one for each scaled loss

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
            self._reductions[self.get_name_scope()] = _SUM if is_sum else reduction

    def reduce_as(self, loss: tf.Tensor) -> None:
        """Has TensorFlow know the reduction of a loss as the last one.

        Args:
          loss: what an optimizer is about to scale; if no loss function has made it the reduction
            stays as it is.
        """
        self._reduction = self._reduction_of([loss]) or self._reduction

    def is_sum(self, targets: Sequence[Any]) -> bool:
        """Whether the last loss function of which tensors are made has made a sum.

        Args:
          targets: what is differentiated.

        Returns:
          True if it has.
        """
        return self._reduction_of(targets) == _SUM

    def _reduction_of(self, targets: Sequence[Any]) -> str | None:
        """The last reduction of those that tensors are made of, which counts before "none".

        A sum that is divided, or multiplied by what is made of data, is a mean of the batch.
        """
        if not self._reductions:
            return None
        made = [each.op for each in targets if isinstance(each, tf.Tensor)]
        divided: list[tf.Operation] = []
        if _SUM in self._reductions.values():  # nothing else needs the walk for each product
            divided = [
                op
                for op in walk(made, self._before_losses)
                if op.type in _DIVISIONS or (op.type in _PRODUCTS and not _has_factor_of_all(op))
            ]
        averaged = {self._scope_of(op) for op in walk(divided, data_before)}
        scopes = {self._scope_of(op) for op in walk(made, data_before)}
        found = [
            _MEAN if reduction == _SUM and scope in averaged else reduction
            for scope, reduction in self._reductions.items()
            if scope in scopes
        ]
        found = [each for each in found if each != _NO_REDUCTION] or found
        return found[-1] if found else None

    def _before_losses(self, op: tf.Operation) -> Collection[tf.Operation]:
        """What an operation is made of, as far as no loss function has made it."""
        return [] if self._scope_of(op) in self._reductions else data_before(op)

    @staticmethod
    def _scope_of(op: tf.Operation) -> str:
        return str(op.name.rpartition("/")[0])

    def is_scaled(self, targets: Sequence[Any]) -> bool:
        """Whether tensors are made of what an optimizer has divided by the number of ranks.

        Args:
          targets: what is differentiated.

        Returns:
          False for what is made of variables that have been updated, or of sums, which are whole.
        """

        def before(op: tf.Operation) -> list[tf.Operation]:
            assigns = any(tensor.dtype._is_ref_dtype for tensor in op.inputs)
            ends = assigns or op in self.marks or is_same_on_all_ranks(op)
            return [] if ends else data_before(op)

        made_of = walk([each.op for each in targets if isinstance(each, tf.Tensor)], before)
        factors = set(self.scale_factors)
        return any(
            op in factors or (op in self.marks and self.marks[op].is_scaled) for op in made_of
        )


def marks_of_graph() -> dict[tf.Operation, Mark]:
    """The gradients of the default graph.

    Returns:
      By operation, of which a sparse gradient has two.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph.marks if isinstance(graph, TrainingGraph) else {}


def _marked(
    graph: TrainingGraph, gradient: Any, source: Any, is_scaled: bool, is_sum: bool
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
    if isinstance(source, tf.Variable):
        mark = Mark(gradient, source.op.outputs[0], source.op.name, row_shape, is_scaled, is_sum)
    else:
        name = getattr(gradient, "values", gradient).op.name
        mark = Mark(gradient, source, name, row_shape, is_scaled, is_sum)
    graph.marks.update({part.op: mark for part in mark.parts})
    return gradient


def _hiding_rows(tensor: tf.Tensor, row_shape: Any) -> tf.Tensor:
    shape = tf.TensorShape([None]).concatenate(row_shape)
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape, name=_NAME)


def _marking_graph() -> TrainingGraph | None:
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return graph if isinstance(graph, TrainingGraph) and graph.marks_gradients else None


def _has_factor_of_all(op: tf.Operation) -> bool:
    """Whether one of the factors of a product is made of no data."""
    return any(
        not any(OF_THIS_RANK.match(each.type) for each in walk([factor.op], data_before))
        for factor in op.inputs
    )


def _mark_results_of_gradients(helper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(helper)
    def gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        results, graph = helper(ys, xs, *args, **kwargs), _marking_graph()
        if graph is None:
            return results
        targets = tf.nest.flatten([ys, args[:1], kwargs.get("grad_ys")])
        kind = graph.is_scaled(targets), graph.is_sum(targets)
        sources = xs if isinstance(xs, (list, tuple)) else [xs]
        return [_marked(graph, gradient, x, *kind) for gradient, x in zip(results, sources)]

    return gradients


def _mark_results_of_tape(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        results, graph = method(self, target, sources, *args, **kwargs), _marking_graph()
        if graph is None:
            return results
        targets = tf.nest.flatten([target, args, list(kwargs.values())])
        kind = graph.is_scaled(targets), graph.is_sum(targets)
        pairs = zip(tf.nest.flatten(results), tf.nest.flatten(sources))
        marked = [_marked(graph, *pair, *kind) for pair in pairs]
        return tf.nest.pack_sequence_as(results, marked)

    return gradient


def _scale_by_reduction(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(scale)
    def scale_loss(loss: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if isinstance(graph, TrainingGraph) and isinstance(loss, tf.Tensor):
            graph.reduce_as(loss)
        return scale(loss)

    return scale_loss


Optimizer._scale_loss = staticmethod(_scale_by_reduction(Optimizer._scale_loss))
gradients_util._GradientsHelper = _mark_results_of_gradients(gradients_util._GradientsHelper)
backprop.GradientTape.gradient = _mark_results_of_tape(backprop.GradientTape.gradient)
