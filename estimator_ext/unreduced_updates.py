"""Updates of trained variables that went around the reduction: found, and mended or refused.

An optimizer may override `apply_gradients`, and a model_fn may assign to its variables by hand.
Nothing of ours is called then, and the ranks would drift apart. So the finished step is searched:

    [U1] find each trained variable to which a value is assigned that may differ by rank
    [U2] go back from there to the gradients on which the value depends, as `gradient_marks` knows
    [U3] reduce these gradients, and feed the mean over the ranks to all consumers

What lies between the gradient and the variable, such as clipping by the global norm and the
optimizer's own rule, then sees what one process would see on the data of all ranks. If a value
depends on this rank's data in any other way, the single-process result is undefined, and the
program is refused.

A gradient can be reduced if it was computed with respect to something that all ranks have alike.
Trained are the trainable variables, and those that are updated with a gradient of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.fingerprint import Updates
from estimator_ext.gradient_marks import Mark, marks_of_graph
from estimator_ext.graph import BRANCHES, CALLS, data_before, predicates_around, walk
from estimator_ext.strategy import HostOffloadStrategy, divided
from estimator_ext.sync_on_read import is_sync_on_read

__all__: list[str] = []

_log = tf.get_logger()

# Chosen alike on all ranks if seeds and programs are the same; the replica check finds it if not.
_TRUSTED = re.compile(r"PyFunc|EagerPyFunc|.*(Random|Normal|Multinomial)|StatefulUniform")
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
    strategy: HostOffloadStrategy, updates: Updates, data: Collection[tf.Operation]
) -> int:
    """Has every update of a trained variable use reduced gradients, as far as it can be done.

    Args:
      strategy: whose training graph is the default graph.
      updates: what the step does.
      data: operations of this rank's input.

    Returns:
      How many gradients are reduced that were not before; they are part of the graph now.
    """
    if strategy.num_replicas_in_sync == 1 and strategy.extended.accumulation is None:
        return 0  # a gradient is its own sum
    return _reduce(strategy, _search(updates, data).edges.values())  # [U3]


def check_mended(updates: Updates, data: Collection[tf.Operation]) -> dict[str, str]:
    """Makes sure that nothing is left to mend.

    Args:
      updates: what the step does now.
      data: operations of this rank's input.

    Returns:
      By name of a trained variable, what its updates use that may differ by rank and that nobody
      can look into, such as a Python function.

    Raises:
      hostopt.ConfigError: a trained variable is updated from this rank's data in a way that no
        reduction can mend.
    """
    search = _search(updates, data)
    mended = search.suspects.keys() - search.causes.keys()
    for variable in search.trained:
        for update in updates.varying.get(variable, ()):
            if variable not in mended:
                cause, cure = search.causes.get(variable) or search.describe(update, update)
                raise hostopt.ConfigError(
                    f"variable {variable!r} is trained, and operation {update.name!r} "
                    f"({update.type}) updates it with a value that differs by rank because of "
                    f"{cause}. To train it on several ranks, {cure}"
                )
    return search.suspects


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


def _search(updates: Updates, data: Collection[tf.Operation]) -> _Search:
    marks = marks_of_graph()
    names = {variable.op.name for variable in tf.compat.v1.trainable_variables()}
    others = {updates.variable_of(mark.source.op) for mark in marks.values()} - names
    names |= {n for n in others & updates.varying.keys() if _has_own_gradient(updates, n, marks)}
    search = _Search(updates, data, sorted(names), marks)
    for name in search.trained:
        search.go_back(name, updates.varying.get(name, ()))  # [U1], [U2]
    return search


def _has_own_gradient(updates: Updates, variable: str, marks: Mapping[tf.Operation, Mark]) -> bool:
    """Whether a variable is updated with a gradient that was computed with respect to it."""

    def before(op: tf.Operation) -> list[tf.Operation]:
        read = [name for name in _variables_read(updates, op) if name != variable]
        return [*data_before(op), *(u for name in read for u in updates.varying.get(name, ()))]

    return any(
        op in marks and updates.variable_of(marks[op].source.op) == variable
        for op in walk(updates.varying[variable], before)
    )


@dataclass(frozen=True)
class _Edge:
    """Where a gradient leaves the backward pass: an input of an operation."""

    variable: str  # whose update depends on it
    mark: Mark
    tensor: tf.Tensor
    consumer: tf.Operation
    index: int


@dataclass
class _Search:
    """Finds gradients that have not been reduced, and what else makes an update vary.

    Args:
      updates: what the step does.
      data: operations of this rank's input.
      trained: names of the trained variables.
      marks: the gradients of the graph.
      edges: where gradients leave the backward pass, by consumer and input.
      suspects: by name of a variable, what may make it differ by rank.
      causes: by name of a variable, what makes it differ, and the cure.
    """

    updates: Updates
    data: Collection[tf.Operation]
    trained: Sequence[str]
    marks: Mapping[tf.Operation, Mark]
    edges: dict[Any, _Edge] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    causes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def go_back(self, variable: str, updates: Sequence[tf.Operation]) -> None:
        """Notes on what the updates of a variable depend."""
        seen: set[tf.Operation] = set()
        todo = [(update, update, False) for update in updates]
        while todo:
            update, op, decides = todo.pop()  # whether a branch or a loop depends on it
            if op in seen:
                continue
            seen.add(op)
            before = [] if op in self.data else self._before(variable, update, op)
            # predicates are looked at first: a branch that returns nothing returns its predicate
            for each, is_predicate in sorted(before, key=lambda found: found[1]):
                if each is not None:  # which is mended
                    todo.append((update, each, decides or is_predicate))
            if not before and op is not update:
                self._note_leaf(variable, update, op, decides)

    def _before(
        self, variable: str, update: tf.Operation, op: tf.Operation
    ) -> list[tuple[tf.Operation | None, bool]]:
        """What varies of that on which an operation depends, and whether it is a predicate.

        None stands for a gradient that can be reduced, of which an edge is noted.
        """
        found: list[tuple[tf.Operation | None, bool]] = [
            (tensor.op, True)
            for tensor in predicates_around(op)
            if not self.updates.is_same(tensor)
        ]
        for index, tensor in enumerate(op.inputs):
            if tensor.dtype != tf.resource and not self.updates.is_same(tensor):
                edge = self._edge(variable, tensor, op, index)
                source = tensor.op if edge is None else None
                if edge is not None:
                    self.edges.setdefault((edge.consumer, edge.index), edge)
                elif tensor.op.type == "IdentityN":
                    source = _without_identities(tensor, op, index)[0].op
                found.append((source, op.type in BRANCHES and index == 0))
        for name in _variables_read(self.updates, op, update):
            if name in self.updates.own:
                changes = self.updates.varying.get(name, [])
                found += [(each, False) for each in changes] or [(None, False)]
                if not changes:
                    self._note_own(variable, name)
        return found

    def _edge(
        self, variable: str, tensor: tf.Tensor, consumer: tf.Operation, index: int
    ) -> _Edge | None:
        """Where a tensor is a gradient that can be reduced, or one of several passed on by one."""
        if tensor.op not in self.marks:
            tensor, consumer, index = _without_identities(tensor, consumer, index)
        mark = self.marks.get(tensor.op)
        if mark is None or tensor.op._get_control_flow_context() is not None:
            return None
        is_trained = self.updates.variable_of(mark.source.op) in self.trained
        if not is_trained and not self.updates.is_same(mark.source):
            return None
        return _Edge(variable, mark, tensor, consumer, index)

    def _note_own(self, variable: str, read: str) -> None:
        by_name = {v.op.name: v for v in tf.compat.v1.global_variables()}
        is_synced = read in by_name and is_sync_on_read(by_name[read])
        cure = _OF_SYNC_ON_READ if is_synced else _OF_INITIAL_VALUE
        cause = f"variable {read!r}, which each rank has by itself"
        self.causes.setdefault(variable, (cause, cure))

    def _note_leaf(
        self, variable: str, update: tf.Operation, op: tf.Operation, decides: bool
    ) -> None:
        if op not in self.data and _TRUSTED.match(op.type):
            self.suspects[variable] = f"{op.name!r} ({op.type})"
        else:
            self.causes.setdefault(variable, self.describe(update, op, decides))

    def describe(
        self, update: tf.Operation, op: tf.Operation, decides: bool = False
    ) -> tuple[str, str]:
        """What makes an update differ by rank, and the cure.

        Args:
          update: the operation that changes a variable.
          op: from which the difference comes.
          decides: whether it decides on the branches that are taken.

        Returns:
          Both in words.
        """
        kind = "this rank's data" if op in self.data else "operation"
        cause = f"{kind} {op.name!r} ({op.type})"
        if decides:
            return f"a branch or loop that depends on {cause}", _OF_PREDICATE
        in_branch = update._get_control_flow_context() is not None
        is_called = update.type in CALLS or op.type in CALLS
        return cause, _IN_BODY if in_branch or is_called else _OF_DATA


def _without_identities(
    tensor: tf.Tensor, consumer: tf.Operation, index: int
) -> tuple[tf.Tensor, tf.Operation, int]:
    """Where a tensor goes into operations that pass on several, each by itself."""
    while tensor.op.type == "IdentityN":
        consumer, index = tensor.op, tensor.value_index
        tensor = consumer.inputs[index]
    return tensor, consumer, index


def _variables_read(
    updates: Updates, op: tf.Operation, update: tf.Operation | None = None
) -> list[str]:
    """Names of the variables that an operation, or the function that it calls, may read."""
    if not op.inputs:
        name = updates.variable_of(op)
        return [name] if name else []
    handles = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    if op is update and op.type not in CALLS:  # the first one is written
        handles = handles[1:]
    return [name for handle in handles if (name := updates.variable_of(handle))]


def _reduce(strategy: HostOffloadStrategy, edges: Iterable[_Edge]) -> int:
    """Reduces each gradient once, feeds the mean to its consumers, and counts gradients."""
    by_mark: dict[Mark, list[_Edge]] = {}
    for edge in edges:
        by_mark.setdefault(edge.mark, []).append(edge)
    for mark, found in by_mark.items():
        mean = _mean(strategy, mark, found[0].variable)
        for edge in found:
            edge.consumer._update_input(edge.index, mean[edge.tensor.ref()])
    if by_mark:
        text = "the optimizer applies gradients by itself: %d are reduced where they are computed"
        _log.info(text, len(by_mark))
    return len(by_mark)


def _mean(strategy: HostOffloadStrategy, mark: Mark, variable: str) -> dict[Any, tf.Tensor]:
    """The mean over the ranks, or the sum of a sum, by the tensors that it stands for."""
    gradient, parts = mark.gradient, mark.parts
    if not mark.row_shape.is_fully_defined():
        raise hostopt.ConfigError(
            f"variable {variable!r} is updated with the sparse gradient of {mark.name!r}, whose "
            f"rows are of shape {mark.row_shape}, wanted a known one. Give {mark.name!r} a static "
            "shape"
        )
    of_row = tuple(mark.row_shape.as_list())
    pairs = [(gradient, mark.name, of_row)]
    (total,) = strategy.extended.sum_gradients(pairs, of_mean=not mark.is_sum)
    if not (mark.is_scaled or mark.is_sum):
        with tf.device(parts[0].device):
            total = divided(total, strategy.num_replicas_in_sync)
    if isinstance(gradient, tf.IndexedSlices) and not isinstance(total, tf.IndexedSlices):
        rows = tf.range(tf.shape(total)[0])  # was made dense
        total = tf.IndexedSlices(total, tf.cast(rows, gradient.indices.dtype))
    results = [total.values, total.indices] if isinstance(total, tf.IndexedSlices) else [total]
    return {part.ref(): result for part, result in zip(parts, results)}
