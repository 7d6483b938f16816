"""Updates of a step of which each element depends only on the elements at its own position.

    reads of the variable and its slots \\
    whole tensors, such as the gradient  > operations element by element > writes
    scalars, such as the learning rate  /

A kernel of TensorFlow's optimizers is one write; other optimizers compute the new values of the
variable and its slots by many operations, and assign them. With a sparse gradient each row depends
only on the values of this row.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from estimator_ext._tf_private import control_flow_context, control_outputs
from estimator_ext.graphs.operation_kinds import READS, arguments
from estimator_ext.graphs.walks import runs_before, users, walk
from estimator_ext.reduction.locked_reads import can_lock, initializing
from hostopt.gradients.bucket import ALIGNMENT_BYTES, TensorSpec
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.reductions import static_spec

_ROW_KERNELS = "ResourceSparseApply"  # with sparse gradients
_KERNELS = ("ResourceApply", _ROW_KERNELS)
_SCATTERS = ("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate")
_BY_ROWS = (_ROW_KERNELS, *_SCATTERS)
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
    # those between that depend on other reads; only operations of the update use their values
    dependent: set[tf.Operation] = field(default_factory=set)
    # operations of others that run after a write and before another operation of the update
    inside: set[tf.Operation] = field(default_factory=set)
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

    def is_late_read(self, op: tf.Operation) -> bool:
        """Returns True for a read between of a value that a write may have changed."""
        handles = [each.handle for each in [self.variable, *self.slots]]
        is_own = op.type == "ReadVariableOp" and any(op.inputs[0] is each for each in handles)
        return is_own and op not in self.first_reads

    @property
    def ready(self) -> list[tf.Operation]:
        """The operations that must have run before the update."""
        others = {*self.operations, *self.inside}
        before = dict.fromkeys(each for op in self.operations for each in runs_before(op))
        return [*self.first_reads, *(each for each in before if each not in others)]

    @property
    def names_of_slots(self) -> list[str]:
        """The names of the slots."""
        return [each.op.name for each in self.slots]

    @property
    def is_kernel(self) -> bool:
        """True if a kernel of TensorFlow makes the whole update."""
        return not self.between and all(op.type.startswith(_KERNELS) for op in self.writes)

    @property
    def is_sparse(self) -> bool:
        """True if only the rows of a sparse gradient change."""
        return bool(self.writes[0].type.startswith(_ROW_KERNELS))

    @property
    def by_rows(self) -> list[tf.Operation]:
        """The writes that take some rows; if there are any, whole rows are divided."""
        return [op for op in self.writes if op.type.startswith(_BY_ROWS)]

    @property
    def row(self) -> list[int]:
        """Shape of what is not divided: an element, or a row."""
        return self.variable.shape[1:].as_list() if self.by_rows else []

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
        return static_spec(self.variable, self.variable.op.name)


def index_of(op: tf.Operation, *names: str) -> int:
    """Returns the index of an input of a write, which has one of these names."""
    return next(i for i, (name, _, _) in enumerate(arguments(op)) if name in names)


def gradient_of(op: tf.Operation) -> int:
    """Returns the index of the gradient, or of its rows, among the inputs of a write."""
    return index_of(op, "delta", "grad", "updates")


class UpdateSearch:
    """The updates of a step that can be divided."""

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

    def find(self) -> list[Update]:
        """Finds the updates, sorted by the name of the variable."""
        updates: dict[tf.Operation, Update] = {}  # by write
        tried: set[tf.Operation] = set()
        for op in filter(_is_write, self._order):
            handle = op.inputs[0].op
            if not op.type.startswith(_KERNELS) and handle not in self._trained:
                continue
            if handle in self._variables and handle not in tried:
                tried.add(handle)
                update = self._find(self._variables[handle])
                if update is not None and updates.keys().isdisjoint(update.writes):
                    updates.update(dict.fromkeys(update.writes, update))
        return sorted(dict.fromkeys(updates.values()), key=lambda each: each.variable.op.name)

    def in_order(self, updates: Sequence[Update]) -> list[Update]:
        """Sets the levels of updates, and returns those that do not wait for themselves."""
        ends = {
            op: 1 << number
            for number, each in enumerate(updates)
            for op in (*each.writes, *each.dependent)
        }
        waits: dict[tf.Operation, int] = {}  # bits of the updates of which it waits for an end
        for op in self._order:
            bits = 0
            for each in runs_before(op):
                bits |= waits.get(each, 0) | ends.get(each, 0)
            if bits:
                waits[op] = bits
        insides = [self._inside(each, waits, 1 << i) for i, each in enumerate(updates)]
        if None in insides:
            return self.in_order(
                [each for each, found in zip(updates, insides) if found is not None]
            )
        needs = []
        for number, (each, inside) in enumerate(zip(updates, insides)):
            each.inside = inside or set()
            own = [waits.get(op, 0) for op in each.operations]
            needs.append(functools.reduce(operator.or_, own) & ~(1 << number))
        for middle in range(len(needs)):  # Warshall's algorithm
            for number in range(len(needs)):
                if needs[number] >> middle & 1:
                    needs[number] |= needs[middle]
        kept = [i for i in range(len(updates)) if not needs[i] >> i & 1]
        for number in sorted(kept, key=lambda i: bin(needs[i]).count("1")):
            levels = [updates[i].level + 1 for i in kept if needs[number] >> i & 1]
            updates[number].level = max(levels, default=0)
        return [updates[i] for i in kept]

    def _inside(
        self, update: Update, waits: Mapping[tf.Operation, int], bit: int
    ) -> set[tf.Operation] | None:
        """Returns None if an operation inside an update may wait for the end of the update."""
        found: set[tf.Operation] = set()
        todo = [each for op in update.operations for each in runs_before(op)]
        own = set(update.operations)
        while todo:
            op = todo.pop()
            if op in own or op in found or not waits.get(op, 0) & bit:
                continue
            is_scalar = _is_computed(op) and op.outputs[0].shape.rank == 0
            is_shared = any(self._is_trained(each) for each in self._variables_of(op))
            if op.type not in ("NoOp", "Const") and (not is_scalar or is_shared):
                return None
            found.add(op)
            todo += runs_before(op)
        return None if any(waits.get(op, 0) & bit for op in update.first_reads) else found

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
            for each in self._variables_of(op):
                if each is None:
                    return None
                if not update.has(each):
                    update.slots.append(each)
                    todo += self._changes(each)
        in_order = sorted(found, key=self._positions.__getitem__)
        update.writes = [op for op in in_order if _is_write(op)]
        update.between = [op for op in in_order if not _is_write(op)]
        for op in update.between:
            is_read = op.type == "ReadVariableOp" and op.inputs[0] is variable.handle
            is_passed = op.type == "Identity" and op.inputs[0].op in update.first_reads
            is_first = is_passed or (is_read and op not in self._after_writes)
            if is_first and found.isdisjoint(op.control_inputs):
                update.first_reads.append(op)
        return update if self._can_divide(update) else None

    def _changes(self, variable: tf.Variable) -> list[tf.Operation]:
        return self._users(variable, READS)

    def _users(self, variable: tf.Variable, without: Collection[str] = ()) -> list[tf.Operation]:
        found = (op for op, _ in users(variable.handle))
        return [op for op in found if op in self._positions and op.type not in without]

    def _variables_of(self, op: tf.Operation) -> list[tf.Variable | None]:
        return [self._variables.get(tensor.op) for _, tensor, is_it in arguments(op) if is_it]

    def _is_trained(self, variable: tf.Variable | None) -> bool:
        return variable is None or variable.handle.op in self._trained

    def _sources(self, op: tf.Operation, update: Update) -> list[tf.Operation]:
        """Returns the operations of an update that compute inputs of one, and notes the others."""
        if op.type == "ReadVariableOp" or op.type.startswith(_BY_ROWS):
            return []
        sources = []
        for index, tensor in enumerate(op.inputs):
            if op.type.startswith(_KERNELS):  # all other inputs are scalars
                is_whole = index == gradient_of(op)
            else:
                is_whole = tensor.dtype != tf.resource and tensor.shape.rank != 0
            if is_whole and self._is_of_update(tensor, update):
                sources.append(tensor.op)
            elif is_whole:
                update.whole.append((op, index))
        return sources

    def _is_of_update(self, tensor: tf.Tensor, update: Update) -> bool:
        """Returns True if a part of a tensor is computed from parts."""
        shape = update.variable.shape
        if tensor.shape != shape or not _is_computed(tensor.op):
            return False
        if tensor.op.type != "ReadVariableOp":
            return all(each.shape.rank == 0 or each.shape == shape for each in tensor.op.inputs)
        (read,) = self._variables_of(tensor.op)
        is_own = read is update.variable or not self._is_trained(read)
        return is_own and bool(self._changes(read))

    def _can_divide(self, update: Update) -> bool:
        """Returns True if nothing else in the step changes the variable or its slots.

        Beyond one host nothing else may read the slots, either.
        """
        variable, slots, writes = update.variable, update.slots, update.writes
        if not variable.device.endswith(HOST_DEVICE) or not variable.shape.is_fully_defined():
            return False
        if any(each.shape != variable.shape or not _has_own_initial(each) for each in slots):
            return False
        if not all(map(control_outputs, writes)):
            return False  # a hook may run one by itself, without [U6]
        if variable.shape.rank == 0 and not update.is_kernel:
            return False
        for each in [variable, *(slots if self._on_one_host else ())]:
            users_of = (op for op in each.handle.consumers() if op not in self._starts)
            if not all(map(can_lock, users_of)):
                return False
        reads = READS if self._on_one_host else ()
        others = [op for each in slots for op in self._users(each, reads)]
        if not set(update.operations).issuperset([*self._changes(variable), *others]):
            return False
        return self._has_parts(update) and self._is_closed(update)

    def _has_parts(self, update: Update) -> bool:
        """Returns True if what enters an update can be divided as the variable is."""
        for op, index in update.whole:
            is_kernel = op.type.startswith(_KERNELS)
            if not is_kernel and op.inputs[index].shape != update.variable.shape:
                return False
        if update.is_sparse:
            return update.is_kernel and len(update.writes) == 1
        for op in update.by_rows:
            has_rows = op.inputs[gradient_of(op)].shape.rank == update.variable.shape.rank
            # beyond one host all rows change, and would have to travel
            if not has_rows or not self._on_one_host:
                return False
        return True

    def _is_closed(self, update: Update) -> bool:
        """Notes what depends on late reads, and returns True if nothing else uses it."""
        own = set(update.operations)
        for op in update.between:
            if update.is_late_read(op) or any(e.op in update.dependent for e in op.inputs):
                update.dependent.add(op)
                if any(not own.issuperset(output.consumers()) for output in op.outputs):
                    return False
        return True


def _has_own_initial(slot: tf.Variable) -> bool:
    """Returns True if the initial value of a slot is the same whenever it is computed."""
    initializer = slot.initializer
    if initializer.type != "AssignVariableOp":
        return True
    return not any(op.op_def.is_stateful for op in walk([initializer.inputs[1].op]))


def _is_computed(op: tf.Operation) -> bool:
    return op.type == "ReadVariableOp" or _ELEMENTWISE.fullmatch(op.type) is not None


def _is_write(op: tf.Operation) -> bool:
    return op.type.startswith(_KERNELS) or op.type in (*_ASSIGNMENTS, *_SCATTERS)
