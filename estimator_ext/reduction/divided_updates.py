"""Updates that the ranks divide: each updates 1/N of every variable, and has only those slots.

The ranks of one host have one copy of the variables, in memory that they share. The graph of such
an update, of which this rank makes elements i to j:

    [U1] note whether anything, such as a hook, has assigned the variable since the last update
    [U2] the variable is destroyed, which releases its memory
    [U3] take the same memory, or other memory if a rank still refers to that; a variable of ours
         takes elements i to j of it
    [U4] the optimizer's own operation updates them in place, by gradient[i:j] and slots[i:j]
    [U5] wait until all ranks have done so
    [U6] the variable takes the memory again

TensorFlow updates in place only a tensor that nothing else refers to, and that claims to own its
memory. A tensor in memory of NumPy does not, but a slice of it does.

Between [U2] and [U6] the variable has no value: see `locked_reads`, which also makes what has
waited for the update wait for [U6]. Whatever else changes a variable makes TensorFlow copy it, as
TensorFlow has not allocated its memory; so the other ranks, which read that memory, see no change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    add_control_inputs,
    control_flow_context,
    control_outputs,
    replace_input,
    replace_inputs,
)
from estimator_ext.graphs.operation_kinds import READS, arguments
from estimator_ext.graphs.walks import runs_before, users, walk
from estimator_ext.reduction.deferred import is_stand_in
from estimator_ext.reduction.divided_slots import (
    DividedSlots,
    DividedVariable,
    of_unknown_shape,
    part_variable,
    share_memory,
)
from estimator_ext.reduction.locked_reads import Window, can_lock, initializing, make_readable
from hostopt.collectives.call import Array
from hostopt.collectives.communicator import all_gather_json
from hostopt.gradients.bucket import ALIGNMENT_BYTES, Bucket, TensorSpec
from hostopt.gradients.divided_update import DividedUpdate
from hostopt.gradients.reducer import BucketReducer
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background

_log = tf.get_logger()

_MIN_BYTES = 64 << 10  # of a variable; to divide a smaller one would take longer than its update
_MIN_ROWS_BYTES = 1 << 20  # of a variable whose gradient is sparse: a step updates few of its rows
# Dense variables and slots of a model whose updates two ranks make faster if they divide them.
# Measured with SGD, Momentum and Adam: as fast at 17 MiB, and 1.03 times as fast at 22 to 45 MiB.
LARGE_BYTES = 24 << 20
# TensorFlow's updates; each element depends on those at its own position only
_ROW_KERNELS = "ResourceSparseApply"  # with sparse gradients
_KERNELS = ("ResourceApply", _ROW_KERNELS)


class _Update(NamedTuple):
    """An update that can be divided."""

    op: tf.Operation
    variable: tf.Variable
    slots: list[tf.Variable]
    level: int  # number of updates in the longest chain before it

    @property
    def has_rows(self) -> bool:
        """True if the gradient is sparse, so that whole rows are divided."""
        return bool(self.op.type.startswith(_ROW_KERNELS))

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
        variable = self.variable
        dtype = np.dtype(variable.dtype.base_dtype.as_numpy_dtype)
        return TensorSpec(variable.op.name, tuple(variable.shape.as_list()), dtype)

    def index_of(self, *names: str) -> int:
        """Returns the index of an input of the operation, which has one of these names."""
        return next(i for i, (name, _, _) in enumerate(arguments(self.op)) if name in names)

    @property
    def gradient(self) -> int:
        """Index of the gradient among the inputs of the operation."""
        return self.index_of("delta", "grad")


class _Group(NamedTuple):
    """Updates of one dtype that do not wait for each other."""

    updates: list[_Update]
    layout: Bucket  # of the variables
    is_scattered: bool  # True if each rank has its part of the gradients only


def divide_updates(
    targets: Sequence[tf.Operation],
    communicator: hostopt.Communicator,
    reduction: Any,
    least_bytes: int = 0,
) -> tuple[list[Window], DividedSlots]:
    """Divides the updates of a step. Collective: all ranks must call it.

    Args:
      least_bytes: if dense variables and their slots are smaller, nothing is divided.

    Returns:
      The times in which the step has taken values away, whose ends it must run, too; and the
      slots.
    """
    groups = _chosen(targets, communicator, reduction, least_bytes)
    divided = [
        DividedVariable(
            update.variable, update.slots, parts, update.shape_of(parts[communicator.rank])
        )
        for group in groups
        for update, *parts in zip(group.updates, *group.layout.parts)
    ]
    shared: Sequence[Array] | None = []
    if communicator.on_one_host:
        shared = share_memory(divided, communicator.duplicate("divided slots"))
    if shared is None:
        groups, divided, shared = [], [], []
    if groups or not least_bytes:
        names = sorted(each.variable.op.name for each in divided)
        _log.info("the ranks divide the updates of %d variables: %s", len(names), ", ".join(names))
    with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("divided_slots"):
        slots = DividedSlots(communicator, divided, shared)
    return [_divide(group, communicator, slots) for group in groups], slots


def _chosen(
    targets: Sequence[tf.Operation],
    communicator: hostopt.Communicator,
    reduction: Any,
    least_bytes: int,
) -> list[_Group]:
    """Agrees on the updates that are divided. Collective: all ranks must call it."""
    found = _find(targets, communicator.on_one_host)
    updates, alone = _on_all_ranks(found, communicator, reduction)
    groups = _group(updates, alone, communicator, reduction)
    dense = [each for group in groups for each in group.updates if not each.has_rows]
    if sum(each.nbytes for each in dense) < least_bytes:
        groups = []
    texts = {
        each.variable.op.name: f"{each.spec} in group {number}"
        + (", scattered" if group.is_scattered else "")
        for number, group in enumerate(groups)
        for each in group.updates
    }
    communicator.check_same(texts, "the updates that the ranks divide")
    return groups


def _on_all_ranks(
    updates: Sequence[_Update], communicator: hostopt.Communicator, reduction: Any
) -> tuple[list[_Update], dict[str, _Update]]:
    """Agrees on the updates that all ranks can divide; one rank may have more users of a value.

    Collective: all ranks must call it.

    Returns:
      The updates, and those that alone use a sum of gradients, by the name of the sum.
    """
    by_op = {each.op: each for each in updates}
    local: dict[str, str | None] = {each.variable.op.name: None for each in updates}
    for name, total in reduction.deferred.sums.items():
        user = _only_user(total, by_op, reduction.means)
        if user is not None:
            local[user.variable.op.name] = name
    of_ranks = all_gather_json(communicator, local, "the updates that each rank can divide")
    common = [e for e in updates if all(e.variable.op.name in each for each in of_ranks)]
    alone: dict[str, _Update] = {}
    for each in common:
        names = {of_rank[each.variable.op.name] for of_rank in of_ranks}
        if len(names) == 1 and None not in names:
            alone[names.pop()] = each
    return common, alone


def _group(
    updates: Sequence[_Update],
    alone: Mapping[str, _Update],
    communicator: hostopt.Communicator,
    reduction: Any,
) -> list[_Group]:
    """Chooses the updates that are divided, and those whose parts are joined in one call."""
    groups = []
    left = {each.op: each for each in updates}
    for reducer in reduction.reducers:
        if not isinstance(reducer, BucketReducer):
            continue
        for number, layout in enumerate(reducer.buckets):
            chosen = [alone[name] for name in layout.names if name in alone]
            levels = {each.level for each in chosen}
            if len(chosen) < len(layout.specs) or len(levels) > 1 or layout.nbytes < _MIN_BYTES:
                continue
            is_scattered = reducer.scatter(number)
            if is_scattered:
                _refuse_fetches([reduction.deferred.sums[name] for name in layout.names])
            groups.append(_Group(chosen, layout, is_scattered))
            for each in chosen:
                del left[each.op]
    others: dict[Any, list[_Update]] = {}
    for each in left.values():
        if each.spec.nbytes >= (_MIN_ROWS_BYTES if each.has_rows else _MIN_BYTES):
            key = each.level, each.spec.dtype, each.unit_bytes, each.has_rows
            others.setdefault(key, []).append(each)
    for (_, _, unit_bytes, _), group in others.items():
        specs = tuple(each.spec for each in group)
        layout = Bucket(tuple(range(len(specs))), specs, communicator.size, unit_bytes)
        groups.append(_Group(group, layout, is_scattered=False))
    return groups


def _only_user(
    gradient: tf.Tensor, updates: Mapping[tf.Operation, _Update], means: Collection[tf.Operation]
) -> _Update | None:
    """Returns the update that alone uses a sum of gradients, or the mean of one."""
    consumers = [each for each in gradient.consumers() if not is_stand_in(each)]
    if len(consumers) != 1:
        return None
    (op,) = consumers
    if op in updates:
        return updates[op] if op.inputs[updates[op].gradient] is gradient else None
    return _only_user(op.outputs[0], updates, means) if op in means else None


def _refuse_fetches(gradients: Sequence[tf.Tensor]) -> None:
    """Makes it an error to fetch a gradient of which each rank has a part."""
    for gradient in gradients:
        for op in filter(is_stand_in, gradient.consumers()):
            text = (
                f"{op.outputs[0].name!r} was fetched, but with shard_optimizer=True each rank has "
                "a part of this gradient. Use it in the graph, as by tf.norm, or pass "
                "shard_optimizer=False"
            )
            with tf.device(HOST_DEVICE), tf.control_dependencies(None):
                refusal = tf.raw_ops.Assert(condition=False, data=[text])
                with tf.control_dependencies([refusal]):
                    replace_input(op, 0, of_unknown_shape(tf.zeros([], gradient.dtype)))


def _find(targets: Sequence[tf.Operation], on_one_host: bool) -> list[_Update]:
    order = walk(targets)
    step, starts = set(order), initializing()
    variables = {v.handle.op: v for v in tf.compat.v1.global_variables() if hasattr(v, "handle")}
    found: list[_Update] = []
    levels: dict[tf.Operation, int] = {}
    for op in order:
        levels[op] = max((levels.get(each, 0) for each in runs_before(op)), default=0)
        if not op.type.startswith(_KERNELS) or control_flow_context(op) is not None:
            continue
        handles = [tensor.op for _, tensor, is_handle in arguments(op) if is_handle]
        if not variables.keys() >= set(handles):
            continue
        variable, *slots = (variables[each] for each in handles)
        if _can_divide(op, variable, slots, step, starts, on_one_host):
            found.append(_Update(op, variable, slots, levels[op]))
            levels[op] += 1
    return sorted(found, key=lambda each: each.variable.op.name)


def _can_divide(
    op: tf.Operation,
    variable: tf.Variable,
    slots: Sequence[tf.Variable],
    step: Collection[tf.Operation],
    starts: Collection[tf.Operation],
    on_one_host: bool,
) -> bool:
    """Returns True if nothing else in the step changes the variable or its slots.

    Beyond one host nothing else may read the slots, either.
    """
    if not variable.device.endswith(HOST_DEVICE):
        return False
    for each in [variable, *(slots if on_one_host else ())]:
        if not all(can_lock(user) for user in each.handle.consumers() if user not in starts):
            return False
    if not control_outputs(op):  # a hook may run it by itself, without [U6]
        return False
    if not variable.shape.is_fully_defined() or any(s.shape != variable.shape for s in slots):
        return False
    is_only_change = _users(variable, step, READS) == [op]
    reads_of_slots = READS if on_one_host else ()
    return is_only_change and all(_users(each, step, reads_of_slots) == [op] for each in slots)


def _users(
    variable: tf.Variable, step: Collection[tf.Operation], without: Collection[str]
) -> list[tf.Operation]:
    return [op for op, _ in users(variable.handle) if op in step and op.type not in without]


def _divide(group: _Group, communicator: hostopt.Communicator, slots: DividedSlots) -> Window:
    ops, updates = tf.raw_ops, group.updates
    variables = [each.variable for each in updates]
    ready = list(dict.fromkeys(op for each in updates for op in runs_before(each.op)))
    names = [slot.op.name for each in updates for slot in each.slots]
    shared = [slots.shared[name] for name in names if name in slots.shared]
    parts_of_slots = [each.part for each in shared]
    divided = DividedUpdate(communicator, group.layout, parts_of_slots, updates[0].has_rows)
    slots.updates.append(divided)
    dtypes = [each.dtype.base_dtype for each in variables]
    rows = []  # that ranks send to each other
    if updates[0].has_rows and not communicator.on_one_host:
        rows = [each.op.inputs[each.index_of("indices")] for each in updates]
    parts = group.layout.parts[communicator.rank]

    def join(*arrays: Array) -> list[Array]:
        count = len(updates) + len(shared)
        return divided.join(arrays[:count], arrays[count:])

    with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("divided_updates"):
        mutex = ops.MutexV2(shared_name=f"divided_updates/{variables[0].op.name}")
        with tf.control_dependencies(ready):
            lock = ops.MutexLock(mutex=mutex)
        end = tf.no_op()
        window = Window(variables, shared, [each.op for each in updates], mutex, lock, end)
        make_readable(window)
        with tf.control_dependencies([lock.op]):
            old = [ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in variables]
        noted = call_python(lambda *values: divided.note(values), old, [])  # [U1]
        with tf.control_dependencies([noted]):
            released = [ops.DestroyResourceOp(resource=v.handle) for v in variables]  # [U2]
        with tf.control_dependencies(released):
            # NumPy's memory is only released when TensorFlow has called a Python function
            called = call_python(lambda: None, [], [])
        with tf.control_dependencies([called]):
            memory = call_in_background(  # [U3]
                abort_on_error(communicator, lambda _: divided.begin()),
                [tf.constant(0)],
                dtypes,
                "begin",
            )
        new_parts = [
            _use_part(update, part, values, group.is_scattered)
            for update, part, values in zip(updates, parts, memory)
        ]
        with tf.control_dependencies(window.updates):
            new_parts += [_read_in_place(each.handle_of_part, each.dtype) for each in shared]
        new = call_in_background(  # [U5]
            abort_on_error(communicator, join),
            [*new_parts, *rows],
            dtypes,
            "join",
        )
        taken = [
            ops.AssignVariableOp(resource=variable.handle, value=value)  # [U6]
            for variable, value in zip(variables, new)
        ]
        with tf.control_dependencies(taken):
            unlocked = ops.ConsumeMutexLock(mutex_lock=lock)
        add_control_inputs(window.end, [unlocked])
    return window


def _use_part(update: _Update, part: slice, memory: tf.Tensor, is_scattered: bool) -> tf.Tensor:
    """Makes an update change a part of the variable and its slots, and returns that part.

    Args:
      memory: the part and ALIGNMENT_BYTES more, as a slice of the whole would be no slice.
    """
    ops, op, variable = tf.raw_ops, update.op, update.variable
    dtype, shape = variable.dtype.base_dtype, update.shape_of(part)
    ours = part_variable(variable, shape)
    values = tf.reshape(memory[: -(ALIGNMENT_BYTES // dtype.size)], shape)
    add_control_inputs(op, [ops.AssignVariableOp(resource=ours, value=values)])
    replace_inputs(op, variable.handle, ours)
    for slot in update.slots:
        replace_inputs(op, slot.handle, part_variable(slot, shape))
    gradient = op.inputs[update.gradient]
    if update.has_rows:
        where = update.index_of("indices")
        start, indices = part.start // math.prod(update.row), op.inputs[where]
        rows = tf.reshape(tf.where((indices >= start) & (indices < start + shape[0])), [-1])
        gradient, indices = tf.gather(gradient, rows), tf.gather(indices, rows) - start
        replace_input(op, where, of_unknown_shape(indices))
    elif not is_scattered:
        gradient = tf.reshape(gradient, [-1])[part]
    replace_input(op, update.gradient, of_unknown_shape(gradient))
    with tf.control_dependencies([op]):  # [U4]
        return _read_in_place(ours, dtype)


def _read_in_place(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # else TensorFlow would copy what an operation with rows has updated
    disabled = tf.raw_ops.DisableCopyOnRead(resource=handle)
    with tf.control_dependencies([disabled]):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
