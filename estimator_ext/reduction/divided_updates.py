"""Updates that the ranks divide: each updates 1/N of every variable, and has only those slots.

The ranks of one host have one copy of the variables, in memory that they share. The graph of such
an update, of which this rank makes elements i to j:

    [U1] note whether anything, such as a hook, has assigned the variable since the last update
    [U2] the variable is destroyed, which releases its memory
    [U3] take the same memory, or other memory if a rank still refers to that; a variable of ours
         takes elements i to j of it
    [U4] the optimizer's own operations update them, by gradient[i:j] and slots[i:j]: a kernel of
         TensorFlow in place, others by copies for the part, whose results are copied there
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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    add_control_inputs,
    control_outputs,
    replace_control_input,
    replace_input,
    replace_inputs,
)
from estimator_ext.reduction.deferred import is_stand_in
from estimator_ext.reduction.divided_slots import (
    DividedSlots,
    DividedVariable,
    of_unknown_shape,
    part_variable,
    share_memory,
)
from estimator_ext.reduction.elementwise import Update, UpdateSearch, gradient_of, index_of
from estimator_ext.reduction.locked_reads import Window, make_readable
from hostopt.collectives.call import Array
from hostopt.collectives.communicator import all_gather_json
from hostopt.gradients.bucket import ALIGNMENT_BYTES, Bucket
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
# The same for each of these variables, on average: with Adam, two ranks made steps 0.88 times as
# fast at 0.75 MiB, 1.06 at 3 MiB, and 1.15 at 12 MiB.
_LARGE_BYTES_OF_EACH = 2 << 20


class _Group(NamedTuple):
    """Updates of one dtype that do not wait for each other."""

    updates: list[Update]
    layout: Bucket  # of the variables
    sums: Sequence[tf.Tensor] = ()  # of gradients, if each rank has its part of them only


def divide_updates(
    targets: Sequence[tf.Operation],
    communicator: hostopt.Communicator,
    reduction: Any,
    least_bytes: int = 0,
) -> tuple[list[Window], DividedSlots]:
    """Divides the updates of a step. Collective: all ranks must call it.

    Args:
      least_bytes: if dense variables and their slots are smaller, or it would not be faster,
        nothing is divided; 0 to divide all that can be.

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
    search = UpdateSearch(targets, communicator.on_one_host)
    updates, alone = _on_all_ranks(search, communicator, reduction)
    groups = _group(updates, alone, communicator, reduction)
    dense = [each for group in groups for each in group.updates if not each.is_sparse]
    least_bytes = max(least_bytes, len(dense) * _LARGE_BYTES_OF_EACH) if least_bytes else 0
    if sum(each.nbytes for each in dense) < least_bytes:
        groups = []
    texts = {
        each.variable.op.name: f"{each.spec} in group {number}, slots {each.names_of_slots}"
        + (", scattered" if group.sums else "")
        for number, group in enumerate(groups)
        for each in group.updates
    }
    communicator.check_same(texts, "the updates that the ranks divide")
    return groups


def _on_all_ranks(
    search: UpdateSearch, communicator: hostopt.Communicator, reduction: Any
) -> tuple[list[Update], dict[str, Update]]:
    """Agrees on the updates that all ranks can divide; one rank may have more users of a value.

    Collective: all ranks must call it.

    Returns:
      The updates, and those that alone use a sum of gradients, by the name of the sum.
    """
    updates = search.find()
    local: dict[str, list[str]] = {each.variable.op.name: [] for each in updates}
    of_op = {op: each for each in updates for op in each.operations}
    for name, total in reduction.deferred.sums.items():
        user = _only_user(total, of_op)
        if user is not None:
            local[user.variable.op.name].append(name)
    of_ranks = all_gather_json(communicator, local, "the updates that each rank can divide")
    common = [e for e in updates if all(e.variable.op.name in each for each in of_ranks)]
    common = search.in_order(common)
    alone: dict[str, Update] = {}
    for each in common:
        first, *others = (of_rank[each.variable.op.name] for of_rank in of_ranks)
        if len(first) == 1 and all(names == first for names in others):
            alone[first[0]] = each
    return common, alone


def _group(
    updates: Sequence[Update],
    alone: Mapping[str, Update],
    communicator: hostopt.Communicator,
    reduction: Any,
) -> list[_Group]:
    """Chooses the updates that are divided, and those whose parts are joined in one call."""
    groups = []
    left = dict.fromkeys(updates)
    for reducer in reduction.reducers:
        if not isinstance(reducer, BucketReducer):
            continue
        for number, layout in enumerate(reducer.buckets):
            chosen = [alone[name] for name in layout.names if name in alone]
            levels = {each.level for each in chosen}
            if len(chosen) < len(layout.specs) or len(levels) > 1 or layout.nbytes < _MIN_BYTES:
                continue
            is_scattered = reducer.scatter(number)
            sums = [reduction.deferred.sums[name] for name in layout.names]
            groups.append(_Group(chosen, layout, sums if is_scattered else ()))
            for each in chosen:
                del left[each]
    others: dict[Any, list[Update]] = {}
    for each in left:
        if each.spec.nbytes >= (_MIN_ROWS_BYTES if each.is_sparse else _MIN_BYTES):
            key = each.level, each.spec.dtype, each.unit_bytes, each.is_sparse
            others.setdefault(key, []).append(each)
    for (_, _, unit_bytes, _), group in others.items():
        specs = tuple(each.spec for each in group)
        layout = Bucket(tuple(range(len(specs))), specs, communicator.size, unit_bytes)
        groups.append(_Group(group, layout))
    return groups


def _only_user(total: tf.Tensor, updates: Mapping[tf.Operation, Update]) -> Update | None:
    """Returns the update that alone uses a sum of gradients."""
    found: dict[tf.Operation, Update] = {}
    todo = [total]
    while todo:
        for op in todo.pop().consumers():
            if op in found:
                continue
            update = updates.get(op)
            is_whole = update is None or op not in (*update.writes, *update.dependent)
            if is_whole and control_outputs(op):  # what waits for it would run it
                return None
            if is_stand_in(op):
                continue
            if update is None or update.by_rows or update.variable.shape != total.shape:
                return None
            found[op] = update
            todo += op.outputs
    users = set(found.values())
    return users.pop() if len(users) == 1 else None


def _divide(group: _Group, communicator: hostopt.Communicator, slots: DividedSlots) -> Window:
    ops, updates = tf.raw_ops, group.updates
    variables = [each.variable for each in updates]
    writes = [op for each in updates for op in each.writes]
    ready = list(dict.fromkeys(op for each in updates for op in each.ready))
    names = [name for each in updates for name in each.names_of_slots]
    shared = [slots.shared[name] for name in names if name in slots.shared]
    parts_of_slots = [each.part for each in shared]
    divided = DividedUpdate(communicator, group.layout, parts_of_slots, updates[0].is_sparse)
    slots.updates.append(divided)
    dtypes = [each.dtype.base_dtype for each in variables]
    rows = []  # that ranks send to each other
    if updates[0].is_sparse and not communicator.on_one_host:
        rows = [op.inputs[index_of(op, "indices")] for op in writes]
    parts = group.layout.parts[communicator.rank]

    def join(*arrays: Array) -> list[Array]:
        count = len(updates) + len(shared)
        return divided.join(arrays[:count], arrays[count:])

    with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("divided_updates"):
        mutex = ops.MutexV2(shared_name=f"divided_updates/{variables[0].op.name}")
        with tf.control_dependencies(ready):
            lock = ops.MutexLock(mutex=mutex)
        end = tf.no_op()
        window = Window(variables, shared, writes, mutex, lock, end)
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
            _use_part(*each, end)
            for each in zip(updates, parts, memory, group.sums or [None] * len(updates))
        ]
        with tf.control_dependencies(writes):
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


def _use_part(
    update: Update, part: slice, memory: tf.Tensor, total: tf.Tensor | None, end: tf.Operation
) -> tf.Tensor:
    """Makes an update change a part of the variable and its slots, and returns that part.

    Args:
      memory: the part and ALIGNMENT_BYTES more, as a slice of the whole would be no slice.
      total: sum of gradients of which this rank has the part only.
    """
    variable, writes = update.variable, update.writes
    dtype, shape = variable.dtype.base_dtype, update.shape_of(part)
    ours = part_variable(variable, shape)
    values = tf.reshape(memory[: -(ALIGNMENT_BYTES // dtype.size)], shape)
    assigned = tf.raw_ops.AssignVariableOp(resource=ours, value=values)
    new = _parts_of_inputs(update, part, total)
    new.update((slot.handle.ref(), part_variable(slot, shape)) for slot in update.slots)
    new[variable.handle.ref()] = ours
    copies: dict[tf.Operation, tf.Operation] = {}
    for op in update.between:
        inputs = [new.get(tensor.ref(), tensor) for tensor in op.inputs]
        before = [copies.get(each, each) for each in op.control_inputs]
        with tf.control_dependencies([*before, assigned]):
            copies[op] = _copy(op, inputs)
        for old, output in zip(op.outputs, copies[op].outputs):
            # an assignment, or an operation that writes into its input, would take the memory
            is_read = op.type == "ReadVariableOp"
            new[old.ref()] = tf.raw_ops.DeepCopy(x=output) if is_read else output
    for op in writes:
        for each in op.control_inputs:
            if each in copies:
                replace_control_input(op, each, copies[each])
        first = [new[each.outputs[0].ref()].op for each in update.first_reads]
        add_control_inputs(op, [assigned, *first])
        for index, tensor in enumerate(op.inputs):
            if tensor.ref() in new:
                value = new[tensor.ref()]
                is_handle = value.dtype == tf.resource
                replace_input(op, index, value if is_handle else of_unknown_shape(value))
    for each in filter(update.dependent.__contains__, update.between):
        for op in control_outputs(each):
            replace_control_input(op, each, copies[each] if op in update.inside else end)
    _refuse_fetches(update, total)
    with tf.control_dependencies(writes):  # [U4]
        return _read_in_place(ours, dtype)


def _parts_of_inputs(update: Update, part: slice, total: tf.Tensor | None) -> dict[Any, tf.Tensor]:
    """Returns what replaces the whole tensors that enter an update, by their references."""
    new = {}
    if total is not None:
        new[total.ref()] = of_unknown_shape(total)
    width = math.prod(update.row)
    start, stop = part.start // width, part.stop // width
    for op, index in update.whole:
        tensor = op.inputs[index]
        if tensor.ref() not in new:
            flat_or_rows = tensor if update.by_rows else tf.reshape(tensor, [-1])
            new[tensor.ref()] = flat_or_rows[start:stop]
    if not update.is_kernel:  # a slice is in the memory of the whole: see `_use_part`
        new = {key: tf.raw_ops.DeepCopy(x=value) for key, value in new.items()}
    rows: dict[Any, tf.Tensor] = {}
    for op in update.by_rows:
        indices, values = op.inputs[index_of(op, "indices")], op.inputs[gradient_of(op)]
        if indices.ref() not in rows:
            is_own = (indices >= start) & (indices < stop)
            rows[indices.ref()] = tf.reshape(tf.where(is_own), [-1])
            new[indices.ref()] = tf.gather(indices, rows[indices.ref()]) - start
        new[values.ref()] = tf.gather(values, rows[indices.ref()])
    return new


def _copy(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    attributes = {name: value for name, value in op.node_def.attr.items() if name != "_class"}
    dtypes = [output.dtype for output in op.outputs]
    return op.graph.create_op(op.type, inputs, dtypes, attrs=attributes, name=op.type)


def _refuse_fetches(update: Update, total: tf.Tensor | None) -> None:
    """Makes it an error to fetch what would have to be computed from parts."""
    variable, reads = update.variable, [op for op in update.between if update.is_late_read(op)]
    if total is None and not reads:
        return
    text = (
        f"a gradient of {variable.op.name!r} or what its update computes was fetched, but each "
        "rank has a part of it, as the ranks divide the update. Use the gradient in the graph, as "
        "by tf.norm, or pass shard_optimizer=False"
    )
    with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[text])]):
        none = part_variable(variable, [])
    for op in reads:
        replace_input(op, 0, none)
    if total is not None:
        value = tf.raw_ops.ReadVariableOp(resource=none, dtype=total.dtype)
        for op in total.consumers():
            if is_stand_in(op) or op in update.between:
                replace_inputs(op, total, of_unknown_shape(value))


def _read_in_place(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # else TensorFlow would copy what an operation with rows has updated
    disabled = tf.raw_ops.DisableCopyOnRead(resource=handle)
    with tf.control_dependencies([disabled]):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
