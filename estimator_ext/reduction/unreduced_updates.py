"""Finds updates of trained variables without a reduction, and reduces their gradients.

An optimizer may override `apply_gradients`, and a model_fn may assign to its variables itself.
Then the strategy is not called, and the ranks would drift apart. So the finished step is searched:

    [U1] Find each trained variable to which a value is assigned that may differ by rank.
    [U2] Go back from there to the marked gradients (`gradient_marks`) that the value depends on.
    [U3] Reduce these gradients, and connect all consumers to the mean over the ranks.

If a value depends on this rank's data in any other way, the program is refused. A variable is
trained if it is trainable, or if it is updated with its own gradient. "Updates that bypass the
reduction" in docs/architecture.md says what can be reduced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import control_flow_context, replace_input
from estimator_ext.graphs.fingerprint import Updates
from estimator_ext.graphs.operation_kinds import SEEDED
from estimator_ext.graphs.walks import BRANCHES, CALLS, data_before, predicates_around, walk
from estimator_ext.reduction.gradient_marks import Mark, marks_of_graph
from estimator_ext.reduction.gradient_reduction import GradientReduction
from estimator_ext.reduction.linear_gradients import LinearGradients
from estimator_ext.reduction.parts_of_batch import refuse_changed_parts
from estimator_ext.variables.sync_on_read import is_sync_on_read
from hostopt.tensorflow.sparse import parts_of, slices_of

_log = tf.get_logger()

_ALL_REDUCE = "tf.distribute.get_replica_context().all_reduce"
_OF_DATA = (
    f"reduce it first with {_ALL_REDUCE}, or gradients with "
    "estimator_ext.reduce_gradients(grads_and_vars)"
)
_OF_PREDICATE = f"let the branch depend on a value that is reduced with {_ALL_REDUCE}"
_IN_BODY = "compute gradients outside of the branch, loop or function"
_OF_INITIAL_VALUE = "initialize that variable with a constant, or create it as a global variable"
_OF_SYNC_ON_READ = f"reduce its value with {_ALL_REDUCE} before it is used"


def mend_unreduced_updates(
    reduction: GradientReduction, updates: Updates, data: Collection[tf.Operation]
) -> int:
    """Reduces the gradients of updates that use them unreduced, as far as possible."""
    if reduction.size == 1 and reduction.accumulation is None:
        return 0  # a gradient is its own sum
    search = _Search(updates, data)
    by_mark: dict[Mark, list[_Edge]] = {}
    for edge in search.edges.values():
        by_mark.setdefault(edge.mark, []).append(edge)
    if reduction.size > 1:
        refuse_changed_parts(updates, data, by_mark, reduction.size)
    return _reduce(reduction, by_mark)  # [U3]


def check_mended(updates: Updates, data: Collection[tf.Operation]) -> dict[str, str]:
    """Checks that no update of a trained variable depends on this rank's data any more.

    Returns by name of a trained variable what cannot be checked, such as a Python function.
    """
    search = _Search(updates, data)
    mended = search.suspects.keys() - search.causes.keys()
    for variable in search.trained:
        for update in updates.varying.get(variable, ()):
            if variable not in mended:
                cause, remedy = search.causes.get(variable) or search.describe(update, update)
                raise hostopt.ConfigError(
                    f"variable {variable!r} is trained, and operation {update.name!r} "
                    f"({update.type}) updates it with a value that differs by rank because of "
                    f"{cause}. To train it on several ranks, {remedy}"
                )
    return search.suspects


def warn_of_local_variables(updates: Updates) -> None:
    """Warns of local variables, of which a checkpoint holds only the value of rank 0."""
    names = [
        variable.op.name
        for variable in tf.compat.v1.global_variables()
        if variable.op.name in updates.local & updates.varying.keys()
        and not is_sync_on_read(variable)
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _log.warning(
            "variable %r%s: each rank updates its own value from its own data, and checkpoints "
            "hold that of rank 0. Create it with synchronization=ON_READ and an aggregation, or "
            "reduce what is assigned to it with tf.distribute.get_replica_context().all_reduce",
            names[0],
            more,
        )


def _uses_own_gradient(
    updates: Updates, variable: str, marks: Mapping[tf.Operation, Mark]
) -> bool:
    def before(op: tf.Operation) -> list[tf.Operation]:
        read = [name for name in _variables_read(updates, op) if name != variable]
        return [*data_before(op), *(u for name in read for u in updates.varying.get(name, ()))]

    return any(
        op in marks and updates.variable_of(marks[op].source.op) == variable
        for op in walk(updates.varying[variable], before)
    )


@dataclass(frozen=True)
class _Edge:
    """An input through which a gradient leaves the backward pass."""

    variable: str  # whose update depends on it
    mark: Mark
    tensor: tf.Tensor
    consumer: tf.Operation
    index: int


@dataclass
class _Search:
    """Finds gradients that are not reduced, and other causes that make an update vary."""

    updates: Updates
    data: Collection[tf.Operation]
    edges: dict[Any, _Edge] = field(default_factory=dict)  # by consumer and index
    # by name of a variable: what may make it differ by rank; what does so, and the remedy
    suspects: dict[str, str] = field(default_factory=dict)
    causes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        marks, varying = marks_of_graph(), self.updates.varying
        names = {variable.op.name for variable in tf.compat.v1.trainable_variables()}
        others = {self.updates.variable_of(mark.source.op) for mark in marks.values()} - names
        own = {n for n in varying.keys() & others if _uses_own_gradient(self.updates, n, marks)}
        self.marks, self.trained = marks, sorted(names | own)
        self.linear = LinearGradients(marks, self.updates.is_same)
        for name in self.trained:
            self.go_back(name, varying.get(name, ()))  # [U1], [U2]

    def go_back(self, variable: str, updates: Sequence[tf.Operation]) -> None:
        """Goes back from the updates of a variable to gradients and other causes: [U2]."""
        seen: set[tf.Operation] = set()
        todo = [(update, update, False, False) for update in updates]
        while todo:
            # decides: True if op is before a predicate; is_inside: before what is in a body
            update, op, decides, is_inside = todo.pop()
            if op in seen:
                continue
            seen.add(op)
            is_inside = is_inside or op.type in CALLS or control_flow_context(op) is not None
            before = [] if op in self.data else self._before(variable, update, op)
            # predicates come last on the stack, so they are visited first: a branch without a
            # result returns its predicate
            for each, is_predicate in sorted(before, key=lambda pair: pair[1]):
                if each is not None:  # None is a gradient that will be reduced
                    todo.append((update, each, decides or is_predicate, is_inside))
            if not before and op is not update:
                if op not in self.data and SEEDED.match(op.type):  # the desync check finds it
                    self.suspects[variable] = f"{op.name!r} ({op.type})"
                else:
                    cause = self.describe(update, op, decides, is_inside)
                    self.causes.setdefault(variable, cause)

    def _before(
        self, variable: str, update: tf.Operation, op: tf.Operation
    ) -> list[tuple[tf.Operation | None, bool]]:
        """Returns the varying operations before one, and whether each computes a predicate.

        None stands for a gradient that can be reduced; its edge is noted.
        """
        result: list[tuple[tf.Operation | None, bool]] = [
            (tensor.op, True)
            for tensor in predicates_around(op)
            if not self.updates.is_same(tensor)
        ]
        for index, tensor in enumerate(op.inputs):
            if tensor.dtype != tf.resource and not self.updates.is_same(tensor):
                edge = self._edge(variable, tensor, op, index)
                if edge is not None:
                    self.edges.setdefault((edge.consumer, edge.index), edge)
                source = None if edge else _without_identities(tensor, op, index)[0].op
                result.append((source, op.type in BRANCHES and index == 0))
        for name in _variables_read(self.updates, op, update):
            if name in self.updates.local:
                changes = self.updates.varying.get(name, [])
                result += [(each, False) for each in changes] or [(None, False)]
                if not changes:
                    self._note_local(variable, name)
        return result

    def _edge(
        self, variable: str, tensor: tf.Tensor, consumer: tf.Operation, index: int
    ) -> _Edge | None:
        if tensor.op not in self.marks:
            tensor, consumer, index = _without_identities(tensor, consumer, index)
        mark = self.marks.get(tensor.op) or self.linear.mark_of(tensor)
        if mark is None or control_flow_context(tensor.op) is not None:
            return None
        is_trained = self.updates.variable_of(mark.source.op) in self.trained
        if not is_trained and not self.updates.is_same(mark.source):
            return None
        return _Edge(variable, mark, tensor, consumer, index)

    def _note_local(self, variable: str, read: str) -> None:
        named = (v for v in tf.compat.v1.global_variables() if v.op.name == read)
        is_synced = any(map(is_sync_on_read, named))
        remedy = _OF_SYNC_ON_READ if is_synced else _OF_INITIAL_VALUE
        cause = f"variable {read!r}, which each rank has by itself"
        self.causes.setdefault(variable, (cause, remedy))

    def describe(
        self, update: tf.Operation, op: tf.Operation, decides: bool = False, inside: bool = False
    ) -> tuple[str, str]:
        """Describes why an update differs by rank, and the remedy."""
        kind = "this rank's data" if op in self.data else "operation"
        cause = f"{kind} {op.name!r} ({op.type})"
        if decides:
            return f"a branch or loop that depends on {cause}", _OF_PREDICATE
        inside = inside or op.type in CALLS or control_flow_context(op) is not None
        return cause, _IN_BODY if inside else _OF_DATA


def _without_identities(
    tensor: tf.Tensor, consumer: tf.Operation, index: int
) -> tuple[tf.Tensor, tf.Operation, int]:
    while tensor.op.type == "IdentityN":
        consumer, index = tensor.op, tensor.value_index
        tensor = consumer.inputs[index]
    return tensor, consumer, index


def _variables_read(
    updates: Updates, op: tf.Operation, update: tf.Operation | None = None
) -> list[str]:
    """Returns the names of the variables that an operation, or a function it calls, may read."""
    if not op.inputs:
        name = updates.variable_of(op)
        return [name] if name else []
    handles = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    if op.type not in CALLS and op is update:  # the first handle is written, not read
        handles = handles[1:]
    return [name for handle in handles if (name := updates.variable_of(handle))]


def _reduce(reduction: GradientReduction, by_mark: Mapping[Mark, Sequence[_Edge]]) -> int:
    """Reduces each gradient once, connects its consumers to the mean, and counts gradients."""
    for mark, edges_of_mark in by_mark.items():
        mean = _mean(reduction, mark, edges_of_mark[0].variable)
        for edge in edges_of_mark:
            replace_input(edge.consumer, edge.index, mean[edge.tensor.ref()])
    if by_mark:
        text = "%d gradients bypass the stock apply_gradients: they are reduced after backward"
        _log.info(text, len(by_mark))
    return len(by_mark)


def _mean(reduction: GradientReduction, mark: Mark, variable: str) -> dict[Any, tf.Tensor]:
    """Returns the mean over the ranks, or the sum if the loss is a sum."""
    if not mark.row_shape.is_fully_defined():
        raise hostopt.ConfigError(
            f"variable {variable!r} is updated with the sparse gradient of {mark.name!r}, whose "
            f"rows are of shape {mark.row_shape}, wanted a known one. Give {mark.name!r} a static "
            "shape"
        )
    gradient, parts = mark.gradient, parts_of(mark.gradient)
    row_shape = tuple(mark.row_shape.as_list())
    gradients = [(gradient, mark.name, row_shape)]
    (total,) = reduction.reduce_marked(gradients, [mark], device=parts[0].device)
    if isinstance(gradient, tf.IndexedSlices) and not isinstance(total, tf.IndexedSlices):
        total = slices_of(total, gradient.indices.dtype)  # an option has made it dense
    return {part.ref(): result for part, result in zip(parts, parts_of(total))}
