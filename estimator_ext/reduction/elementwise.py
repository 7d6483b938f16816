"""Updates of a step of which each element depends only on the elements at its own position.

    reads of the variable and its slots \\
    whole tensors, such as the gradient  > operations element by element > writes
    scalars, such as the learning rate  /

A kernel of TensorFlow's optimizers is one write; other optimizers compute the new values of the
variable and its slots by many operations, and assign them. A kernel with a sparse gradient updates
rows that each depend only on their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from estimator_ext._tf_private import control_flow_context, control_outputs
from estimator_ext.graphs.operation_kinds import READS, arguments
from estimator_ext.graphs.walks import depends_on, runs_after, runs_before, users, walk
from estimator_ext.reduction.locked_reads import can_lock, initializing
from hostopt.gradients.bucket import ALIGNMENT_BYTES, TensorSpec
from hostopt.tensorflow.background import HOST_DEVICE

_ROW_KERNELS = "ResourceSparseApply"  # with sparse gradients
_KERNELS = ("ResourceApply", _ROW_KERNELS)
_ASSIGNMENTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_ELEMENTWISE = re.compile(
    r"Add(V2|N)?|Sub|Mul(NoNan)?|(Real)?Div(NoNan)?|Neg|Abs|Sign|Square(dDifference)?|R?[Ss]qrt"
    r"|Reciprocal|Pow|Exp|Log(1p)?|Tanh|Sigmoid|Maximum|Minimum|ClipByValue|Identity|StopGradient"
    r"|Cast|Select(V2)?|(Greater|Less)(Equal)?|Logical(And|Or|Not)|(Not)?Equal|IsFinite"
    r"|(Zeros|Ones)Like"
)


@dataclass(eq=False)
class Update:
    """An update of a variable and its slots that can be divided."""

    variable: tf.Variable
    slots: list[tf.Variable] = field(default_factory=list)
    writes: list[tf.Operation] = field(default_factory=list)
    # what computes the values for them, in topological order
    between: list[tf.Operation] = field(default_factory=list)
    # reads among these of the variable before all writes; others may use them, such as forward
    first_reads: list[tf.Operation] = field(default_factory=list)
    # inputs of these operations that are neither scalars nor computed by them
    whole: list[tuple[tf.Operation, int]] = field(default_factory=list)
    level: int = 0  # number of updates in the longest chain before it

    @property
    def operations(self) -> list[tf.Operation]:
        """All operations of the update."""
        return [*self.between, *self.writes]

    def has(self, variable: tf.Variable) -> bool:
        """Returns True for the variable and its slots."""
        return any(variable is each for each in [self.variable, *self.slots])

    def reads(self, op: tf.Operation) -> bool:
        """Returns True for an operation between that reads a value after the update has begun."""
        handles = [each.handle for each in [self.variable, *self.slots]]
        is_read = op.type == "ReadVariableOp" and any(op.inputs[0] is each for each in handles)
        return is_read and op not in self.first_reads

    @property
    def ready(self) -> list[tf.Operation]:
        """The operations that must have run before the update."""
        own = set(self.operations)
        before = dict.fromkeys(each for op in self.operations for each in runs_before(op))
        return [*self.first_reads, *(each for each in before if each not in own)]

    @property
    def has_rows(self) -> bool:
        """True if the gradient is sparse, so that whole rows are divided."""
        return bool(self.writes[0].type.startswith(_ROW_KERNELS))

    @property
    def row(self) -> list[int]:
        """Shape of what is not divided: an element, or a row."""
        return self.variable.shape[1:].as_list() if self.has_rows else []

    @property
    def unit_bytes(self) -> int:
        """Size that a part has a multiple of."""
        return math.lcm(math.prod(self.row) * self.spec.dtype.itemsize, ALIGNMENT_BYTES)

    @property
    def nbytes(self) -> int:
        """Size of the variable and its slots."""
        return self.spec.nbytes * (1 + len(self.slots))

    def shape_of(self, part: slice) -> list[int]:
        """Returns the shape of a part."""
        return [(part.stop - part.start) // math.prod(self.row), *self.row]

    @property
    def spec(self) -> TensorSpec:
        """Name, shape and dtype of the variable."""
        variable = self.variable
        dtype = np.dtype(variable.dtype.base_dtype.as_numpy_dtype)
        return TensorSpec(variable.op.name, tuple(variable.shape.as_list()), dtype)


def index_of(op: tf.Operation, *names: str) -> int:
    """Returns the index of an input of a kernel, which has one of these names."""
    return next(i for i, (name, _, _) in enumerate(arguments(op)) if name in names)


def gradient_of(op: tf.Operation) -> int:
    """Returns the index of the gradient among the inputs of a kernel."""
    return index_of(op, "delta", "grad")


def find_updates(targets: Sequence[tf.Operation], on_one_host: bool) -> list[Update]:
    """Finds the updates of a step that can be divided, sorted by the name of the variable."""
    return _Search(targets, on_one_host).run()


class _Search:
    def __init__(self, targets: Sequence[tf.Operation], on_one_host: bool) -> None:
        self._order = walk(targets)
        self._positions = {op: position for position, op in enumerate(self._order)}
        self._starts = initializing()
        self._after_writes: set[tf.Operation] = set()
        for op in self._order:
            if any(_is_write(e) or e in self._after_writes for e in runs_before(op)):
                self._after_writes.add(op)
        self._on_one_host = on_one_host
        everything = [v for v in tf.compat.v1.global_variables() if hasattr(v, "handle")]
        self._variables = {v.handle.op: v for v in everything}
        self._trained = {v.handle.op for v in tf.compat.v1.trainable_variables()}

    def run(self) -> list[Update]:
        updates: dict[tf.Operation, Update] = {}  # by write
        tried: set[tf.Operation] = set()
        for op in self._order:
            if not _is_write(op):
                continue
            handle = op.inputs[0].op
            if op.type in _ASSIGNMENTS and handle not in self._trained:
                continue
            if handle in self._variables and handle not in tried:
                tried.add(handle)
                update = self._find(self._variables[handle])
                if update is not None and updates.keys().isdisjoint(update.writes):
                    updates.update(dict.fromkeys(update.writes, update))
        found = list(dict.fromkeys(updates.values()))
        return sorted(self._with_levels(found), key=lambda each: each.variable.op.name)

    def _find(self, variable: tf.Variable) -> Update | None:
        """Returns the update of a variable if it can be divided."""
        update = Update(variable)
        found: set[tf.Operation] = set()
        todo = self._changes(variable)
        while todo:
            op = todo.pop()
            if op in found:
                continue
            if control_flow_context(op) is not None or not (_is_write(op) or _is_computed(op)):
                return None
            found.add(op)
            todo += self._sources(op, update)
            if not _is_write(op) and op.outputs[0].shape != variable.shape:
                continue
            for each in self._variables_of(op):
                if each is None:
                    return None
                if not update.has(each):
                    update.slots.append(each)
                    todo += self._changes(each)
        in_order = sorted(found, key=self._positions.__getitem__)
        update.writes = [op for op in in_order if _is_write(op)]
        update.between = [op for op in in_order if not _is_write(op)]
        update.first_reads = self._first_reads(update)
        return update if self._can_divide(update) else None

    def _changes(self, variable: tf.Variable) -> list[tf.Operation]:
        return self._users(variable, READS)

    def _users(self, variable: tf.Variable, without: Collection[str] = ()) -> list[tf.Operation]:
        found = (op for op, _ in users(variable.handle))
        return [op for op in found if op in self._positions and op.type not in without]

    def _variables_of(self, op: tf.Operation) -> list[tf.Variable | None]:
        return [self._variables.get(tensor.op) for _, tensor, is_it in arguments(op) if is_it]

    def _sources(self, op: tf.Operation, update: Update) -> list[tf.Operation]:
        """Returns the operations of an update that compute inputs of one, and notes the others."""
        sources: list[tf.Operation] = []
        if op.type.startswith(_ROW_KERNELS):
            return sources
        may_be_whole = range(len(op.inputs))
        if op.type.startswith(_KERNELS):  # all others are scalars
            may_be_whole = range(gradient_of(op), gradient_of(op) + 1)
        for index, tensor in enumerate(op.inputs):
            if tensor.dtype == tf.resource:
                continue
            if tensor.shape.rank == 0:
                if tensor.op in self._after_writes and _is_computed(tensor.op):
                    sources.append(tensor.op)  # it may wait for a write of this update
            elif index in may_be_whole:
                if self._is_of_update(tensor, update):
                    sources.append(tensor.op)
                else:
                    update.whole.append((op, index))
        return sources

    def _is_of_update(self, tensor: tf.Tensor, update: Update) -> bool:
        if tensor.shape != update.variable.shape:
            return False
        if tensor.op.type != "ReadVariableOp":
            return _is_computed(tensor.op)
        (read,) = self._variables_of(tensor.op)
        is_own = read is update.variable or tensor.op.inputs[0].op not in self._trained
        return read is not None and is_own and bool(self._changes(read))

    def _first_reads(self, update: Update) -> list[tf.Operation]:
        found: list[tf.Operation] = []
        for op in update.between:
            if op.type == "ReadVariableOp":
                is_of_variable = op.inputs[0] is update.variable.handle
                if is_of_variable and not depends_on([op], update.writes):
                    found.append(op)
            elif op.type == "Identity" and op.inputs[0].op in found:
                found.append(op)
        return found

    def _can_divide(self, update: Update) -> bool:
        """Returns True if nothing else in the step changes the variable or its slots.

        Beyond one host nothing else may read the slots, either.
        """
        variable, slots, writes = update.variable, update.slots, update.writes
        if not variable.device.endswith(HOST_DEVICE) or not variable.shape.is_fully_defined():
            return False
        if any(each.shape != variable.shape for each in slots):
            return False
        if not all(map(control_outputs, writes)):
            return False  # a hook may run one by itself, without [U6]
        if any(op.type.startswith(_ROW_KERNELS) for op in writes) and len(update.operations) > 1:
            return False
        for each in [variable, *(slots if self._on_one_host else ())]:
            users_of = (op for op in each.handle.consumers() if op not in self._starts)
            if not all(map(can_lock, users_of)):
                return False
        reads = READS if self._on_one_host else ()
        others = [op for each in slots for op in self._users(each, reads)]
        if not set(update.operations).issuperset([*self._changes(variable), *others]):
            return False
        return self._is_closed(update)

    def _is_closed(self, update: Update) -> bool:
        """Returns True if all that depends on other reads of values goes to the writes only."""
        for op, index in update.whole:
            is_kernel = op.type.startswith(_KERNELS)
            if not is_kernel and op.inputs[index].shape != update.variable.shape:
                return False
        depends: set[tf.Operation] = set()
        for op in update.between:
            if update.reads(op) or any(tensor.op in depends for tensor in op.inputs):
                depends.add(op)
                if control_outputs(op) or not set(update.operations).issuperset(runs_after(op)):
                    return False
        return True

    def _with_levels(self, updates: Sequence[Update]) -> list[Update]:
        """Sets the levels, and returns the updates without those that wait for themselves."""
        of_op = {op: each for each in updates for op in each.operations}
        writes = {op for each in updates for op in each.writes}
        rising = list(updates)
        for _ in range(len(updates) + 1):
            if not rising:
                return list(updates)
            rising, levels = [], dict.fromkeys(self._order, 0)
            for op in self._order:
                own = of_op.get(op)
                for each in runs_before(op):
                    is_other = each in writes and of_op[each] is not own
                    levels[op] = max(levels[op], levels.get(each, 0) + is_other)
                if own is not None:
                    levels[op] = max(levels[op], own.level)
                    if levels[op] > own.level:
                        own.level = levels[op]
                        rising.append(own)
        return self._with_levels([each for each in updates if each not in rising])


def _is_computed(op: tf.Operation) -> bool:
    return op.type == "ReadVariableOp" or _ELEMENTWISE.fullmatch(op.type) is not None


def _is_write(op: tf.Operation) -> bool:
    return op.type.startswith(_KERNELS) or op.type in _ASSIGNMENTS
