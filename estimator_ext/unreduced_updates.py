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
    "gradients or tf.distribute.get_replica_context().all_reduce for other tensors, or create the "
    "variable with trainable=False"
)


class TrainingGraph(tf.Graph):
    """A graph that notes the factors by which optimizers have scaled losses: 1 / size."""

    def __init__(self) -> None:
        super().__init__()
        self._loss_is_scaled = False
        self.scale_factors: list[tf.Operation] = []

    @property
    def _is_loss_scaled_by_optimizer(self) -> bool:
        return self._loss_is_scaled

    @_is_loss_scaled_by_optimizer.setter
    def _is_loss_scaled_by_optimizer(self, is_scaled: bool) -> None:
        self._loss_is_scaled = is_scaled
        if is_scaled:  # set right after the multiplication
            self.scale_factors.append(self.get_operations()[-1].inputs[1].op)


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
    search = _search(updates, data)
    return Mended(_reduce(strategy, search.edges), search.suspects)  # [U3]


def check_mended(updates: Updates, data: Collection[tf.Operation]) -> None:
    """Makes sure that nothing is left to mend.

    Args:
      updates: what the step does now.
      data: operations of this rank's input.

    Raises:
      hostopt.ConfigError: a trainable variable is updated with a value that differs by rank.
    """
    search = _search(updates, data)
    for edge in search.edges:
        search.refuse(edge.variable, edge.consumer, edge.tensor.op)
    for variable, operations in updates.varying.items():
        if variable not in updates.own and variable not in search.suspects:
            search.refuse(variable, operations[0], operations[0])


def _search(updates: Updates, data: Collection[tf.Operation]) -> _Search:
    trainable = tf.compat.v1.trainable_variables()
    search = _Search(updates, data, {tuple(v.shape.as_list()) for v in trainable})
    for variable in trainable:
        for op in updates.varying.get(variable.op.name, ()):  # [U1]
            search.go_back(variable.op.name, op)  # [U2]
    return search


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
            "reduce what is assigned to it with tf.distribute.get_replica_context().all_reduce",
            own[0],
            more,
        )


@dataclass
class _Edge:
    """Where a gradient leaves the backward pass: an input of an operation."""

    variable: str  # whose update depends on it
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
                edge = _through_identities(_Edge(variable, tensor, op, index))
                if self._leaves_backward(edge.tensor, edge.consumer):
                    self.edges.append(edge)
                else:
                    todo.append(edge.tensor.op)
            own = [name for name in _variables_read(op, update) if name in self.updates.own]
            for name in own:
                todo += self._updates_of(variable, update, op, name)
            if not varying and not own and op is not update:
                self._check_trusted(variable, update, op)

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

    def _updates_of(
        self, variable: str, update: tf.Operation, reader: tf.Operation, read: str
    ) -> list[tf.Operation]:
        """What makes the value of a variable that differs by rank, such as an optimizer's slot."""
        if read not in self.updates.varying:  # a local variable, or one that is synced on read
            self.refuse(variable, update, reader)
        return self.updates.varying[read]

    def _check_trusted(self, variable: str, update: tf.Operation, source: tf.Operation) -> None:
        if source in self.data or not _TRUSTED.match(source.type):
            self.refuse(variable, update, source)
        self.suspects[variable] = f"{source.name!r} ({source.type})"

    def refuse(self, variable: str, update: tf.Operation, source: tf.Operation) -> None:
        """Raises the error of an update that cannot be mended."""
        raise hostopt.ConfigError(
            f"trainable variable {variable!r} is updated by operation {update.name!r} "
            f"({update.type}) with a value that differs by rank, as it depends on "
            f"{source.name!r} ({source.type}) other than through a gradient. {_CURE}"
        )


def _through_identities(edge: _Edge) -> _Edge:
    """Where a tensor goes into operations that pass on several, each by itself."""
    while edge.tensor.op.type == "IdentityN" and not _is_sparse_mark(edge.tensor.op):
        op, index = edge.tensor.op, edge.tensor.value_index
        edge = _Edge(edge.variable, op.inputs[index], op, index)
    return edge


def _is_sparse_mark(op: tf.Operation) -> bool:
    return op.type == "IdentityN" and _SPARSE_MARK in op.name


def _variables_read(op: tf.Operation, update: tf.Operation) -> list[str]:
    """Names of the variables that an operation, or the function that it calls, may read."""
    if op.type in ("VariableV2", "Variable"):
        return [op.name]
    handles = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    is_call = any(attribute.type in ("func", "list(func)") for attribute in op.op_def.attr)
    if op is update and not is_call:  # the first one is written
        handles = handles[1:]
    return [handle.name for handle in handles if handle.type == "VarHandleOp"]


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
    factors = set(op.graph.scale_factors)
    return bool(factors) and not factors.isdisjoint(ancestors([op]))
