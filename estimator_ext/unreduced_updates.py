"""Updates of trainable variables that went around the reduction: found, and mended or refused.

An optimizer may override `apply_gradients`, and a model_fn may assign to its variables by hand.
Nothing of ours is called then, and the ranks would drift apart. So the finished step is searched:

    [U1] find each trainable variable to which a value is assigned that may differ by rank
    [U2] go back from there to the gradients on which the value depends: the tensors that leave
         the backward pass
    [U3] put a reduction there, and have everything behind it use the mean over the ranks

What lies between the gradient and the variable, such as clipping by the global norm and the
optimizer's own rule, then sees what one process would see on the data of all ranks. If a value
depends on this rank's data in any other way, there is no telling what one process would do, and
the program is refused.

A backward pass is told by the name scope in which TensorFlow builds it, and the two tensors of a
sparse gradient by an operation that `mark_sparse_gradients` adds.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

import hostopt
from estimator_ext.fingerprint import Updates, ancestors
from estimator_ext.strategy import HostOffloadStrategy, divided
from estimator_ext.sync_on_read import is_sync_on_read

__all__: list[str] = []

_log = tf.get_logger()

_BACKWARD = re.compile(r"(^|/)(gradients(_\d+)?|gradient_tape)/")
_SPARSE_MARK = "HostSparseGradient"
_GATHERS = ("ResourceGather", "GatherV2")
# Chosen alike on all ranks if seeds and programs are the same; the replica check finds it if not.
_TRUSTED = re.compile(r"PyFunc|EagerPyFunc|.*(Random|Normal|Multinomial)|StatefulUniform")
_CURE = (
    "Reduce what it is made of first, with estimator_ext.reduce_gradients(grads_and_vars) for "
    "gradients or strategy.reduce for other tensors, or create the variable with trainable=False"
)


class TrainingGraph(tf.Graph):
    """A graph that notes which losses an optimizer has divided by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._loss_is_scaled = False
        self.scaled_losses: list[tf.Operation] = []

    @property
    def _is_loss_scaled_by_optimizer(self) -> bool:
        return self._loss_is_scaled

    @_is_loss_scaled_by_optimizer.setter
    def _is_loss_scaled_by_optimizer(self, is_scaled: bool) -> None:
        self._loss_is_scaled = is_scaled
        if is_scaled:  # set right after the division
            self.scaled_losses.append(self.get_operations()[-1])


@contextlib.contextmanager
def mark_sparse_gradients(graph: tf.Graph) -> Iterator[None]:
    """Has the gradients of lookups that are built in the block marked as such.

    Args:
      graph: the training graph.

    Yields:
      Nothing.
    """
    with graph.gradient_override_map({name: f"Hostopt{name}" for name in _GATHERS}):
        yield


def _marked_gradient(op: tf.Operation, *grads: Any) -> Any:
    first, *rest = gradient_registry.lookup(op.type)(op, *grads)
    if isinstance(first, tf.IndexedSlices):
        parts = [first.values, first.indices, first.dense_shape]
        values, indices, _ = tf.raw_ops.IdentityN(input=parts, name=_SPARSE_MARK)
        first = tf.IndexedSlices(values, indices, first.dense_shape)
    return (first, *rest)


for _name in _GATHERS:
    tf.RegisterGradient(f"Hostopt{_name}")(_marked_gradient)


@dataclass(frozen=True)
class Mended:
    """What a search has found.

    Args:
      reduced: how many gradients are reduced that were not before.
      suspects: by name of a trainable variable, what its updates use that may differ by rank and
        that nobody can look into, such as a Python function.
    """

    reduced: int
    suspects: dict[str, str]


def mend_unreduced_updates(
    strategy: HostOffloadStrategy, updates: Updates, data: Collection[tf.Operation]
) -> Mended:
    """Has every update of a trainable variable use reduced gradients.

    Args:
      strategy: of several ranks, whose training graph is the default graph.
      updates: what the step does.
      data: operations of this rank's input.

    Returns:
      What was found; the graph has been changed if gradients are reduced.

    Raises:
      hostopt.ConfigError: a trainable variable is updated from this rank's data in a way that no
        reduction can mend.
    """
    shapes = {tuple(v.shape.as_list()) for v in tf.compat.v1.trainable_variables()}
    search = _Search(updates, data, shapes)
    for variable in tf.compat.v1.trainable_variables():
        for op in updates.varying.get(variable.op.name, ()):  # [U1]
            search.go_back(variable.op.name, op)  # [U2]
    return Mended(_reduce(strategy, search.edges), search.suspects)  # [U3]


def warn_of_own_variables(updates: Updates) -> None:
    """Logs which variables each rank changes by itself, as a checkpoint holds rank 0's alone.

    Args:
      updates: what the step does.
    """
    own = [
        variable.op.name
        for variable in tf.compat.v1.global_variables()
        if variable.op.name in updates.own & updates.varying.keys()
        and not is_sync_on_read(variable)
    ]
    if own:
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        _log.warning(
            "variable %r%s: each rank updates its own value from its own data, and checkpoints "
            "hold that of rank 0. Create it with synchronization=ON_READ and an aggregation, or "
            "reduce what is assigned to it with strategy.reduce",
            own[0],
            more,
        )


@dataclass
class _Edge:
    """Where a gradient leaves the backward pass: an input of an operation."""

    tensor: tf.Tensor
    consumer: tf.Operation
    index: int


@dataclass
class _Search:
    """Finds gradients that have not been reduced.

    Args:
      updates: what the step does.
      data: operations of this rank's input.
      shapes: of the trainable variables.
    """

    updates: Updates
    data: Collection[tf.Operation]
    shapes: Collection[tuple[int, ...]]
    edges: list[_Edge] = field(default_factory=list)
    suspects: dict[str, str] = field(default_factory=dict)
    _seen: set[tf.Operation] = field(default_factory=set)

    def go_back(self, variable: str, update: tf.Operation) -> None:
        """Notes the gradients on which an update depends."""
        todo = [update]
        while todo:
            op = todo.pop()
            if op in self._seen:
                continue
            self._seen.add(op)
            varying = [
                (index, tensor)
                for index, tensor in enumerate(op.inputs)
                if tensor.dtype != tf.resource and not self.updates.is_same(tensor)
            ]
            for index, tensor in varying:
                if self._leaves_backward(tensor, op):
                    self.edges.append(_Edge(tensor, op, index))
                else:
                    todo.append(tensor.op)
            if not varying and op is not update:
                todo += self._behind(variable, update, op)

    def _leaves_backward(self, tensor: tf.Tensor, consumer: tf.Operation) -> bool:
        op = tensor.op
        if _is_sparse_mark(op):
            return True
        if not tensor.dtype.is_floating or not tensor.shape.is_fully_defined():
            return False
        if any(_is_sparse_mark(part.op) for part in op.inputs):  # several lookups, concatenated
            return False
        return (
            _BACKWARD.search(op.name) is not None
            and _BACKWARD.search(consumer.name) is None
            and op._get_control_flow_context() is None
            and tuple(tensor.shape.as_list()) in self.shapes
        )

    def _behind(
        self, variable: str, update: tf.Operation, source: tf.Operation
    ) -> list[tf.Operation]:
        """What makes a value that has no inputs which differ by rank: updates of a variable."""
        if source not in self.data and _TRUSTED.match(source.type):
            self.suspects[variable] = f"{source.name!r} ({source.type})"
            return []
        read = _variable_behind(source)
        if read in self.updates.varying:  # such as a slot of the optimizer
            return self.updates.varying[read]
        raise hostopt.ConfigError(
            f"trainable variable {variable!r} is updated by operation {update.name!r} "
            f"({update.type}) with a value that differs by rank, as it depends on "
            f"{source.name!r} ({source.type}) other than through a gradient. {_CURE}"
        )


def _is_sparse_mark(op: tf.Operation) -> bool:
    return op.type == "IdentityN" and _SPARSE_MARK in op.name


def _variable_behind(source: tf.Operation) -> str:
    """Name of the variable that an operation without other inputs reads."""
    handles = [tensor.op for tensor in source.inputs if tensor.dtype == tf.resource]
    return handles[0].name if handles else source.name


def _reduce(strategy: HostOffloadStrategy, edges: Sequence[_Edge]) -> int:
    """Reduces each gradient once, gives the mean to all that use it, and counts gradients."""
    by_source: dict[Any, list[_Edge]] = {}
    for edge in edges:
        op = edge.tensor.op
        by_source.setdefault(op if _is_sparse_mark(op) else edge.tensor.ref(), []).append(edge)
    for found in by_source.values():
        mean = _mean(strategy, found[0].tensor)
        for edge in found:
            edge.consumer._update_input(edge.index, mean[edge.tensor.ref()])
    if by_source:
        text = "the optimizer applies gradients by itself: %d are reduced where they are computed"
        _log.info(text, len(by_source))
    return len(by_source)


def _mean(strategy: HostOffloadStrategy, tensor: tf.Tensor) -> dict[Any, tf.Tensor]:
    """The mean over the ranks, by the tensors that it stands for."""
    op = tensor.op
    gradient = tf.IndexedSlices(*op.outputs) if _is_sparse_mark(op) else tensor
    shape = tf.get_static_value(op.inputs[2]) if _is_sparse_mark(op) else tensor.shape
    row_shape = () if shape is None else tuple(int(length) for length in shape[1:])
    (total,) = strategy.extended.sum_gradients([(gradient, op.name, row_shape)], of_mean=True)
    if not _is_scaled(op):
        with tf.device(tensor.device):
            total = divided(total, strategy.num_replicas_in_sync)
    if not _is_sparse_mark(op):
        return {tensor.ref(): total}
    if not isinstance(total, tf.IndexedSlices):  # was made dense
        rows = tf.range(tf.shape(total)[0])
        total = tf.IndexedSlices(total, tf.cast(rows, op.outputs[1].dtype), op.outputs[2])
    parts = total.values, total.indices, op.outputs[2]
    return {output.ref(): part for output, part in zip(op.outputs, parts)}


def _is_scaled(op: tf.Operation) -> bool:
    """Whether a gradient is one of a loss that has been divided by the number of ranks."""
    scaled = set(op.graph.scaled_losses)
    return bool(scaled) and not scaled.isdisjoint(ancestors([op]))
