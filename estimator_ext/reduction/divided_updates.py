"""Updates that the ranks divide: each updates 1/N of every variable, and has only those slots.

The graph of such an update, of which this rank makes elements i to j:

    [U1] a variable of ours takes variable[i:j]
    [U2] the optimizer's own operation copies and updates it, by gradient[i:j] and slots[i:j]
    [U3] the parts of all ranks are joined, in memory that the ranks of one host share
    [U4] the variable takes that memory, without copying

What has waited for the update waits for [U4]. Each step reads the variable itself, so whatever
else changes it, such as a hook, counts. TensorFlow changes no memory of NumPy, so it copies the
variable then: the other ranks read that memory.

The slots of the program have no values while it trains, so that reading one is an error. Rank 0
has all of them while it saves: a checkpoint is the same as without divided updates. The other
ranks never have more than their parts.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    add_control_inputs,
    control_flow_context,
    control_outputs,
    replace_input,
)
from estimator_ext.graphs.operation_kinds import READS, arguments
from estimator_ext.graphs.walks import runs_before, users, walk
from estimator_ext.variables.sync_on_read import assign
from hostopt.gradients.bucket import TensorSpec
from hostopt.gradients.divided_update import DividedUpdate, part_of
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background

_log = tf.get_logger()

_MIN_BYTES = 64 << 10  # of a variable; to divide a smaller one would take longer than its update
# TensorFlow's updates with dense gradients; each element depends on those at its own position only
_KERNELS = "ResourceApply"
_EMPTY = (0,)  # shape of a slot that has only been initialized


class _Update(NamedTuple):
    """An update that can be divided."""

    op: tf.Operation
    variable: tf.Variable
    slots: list[tf.Variable]
    level: int  # number of updates in the longest chain before it


class _Slot(NamedTuple):
    """A slot of which each rank has a part."""

    whole: tf.Variable  # of the program
    value: tf.Tensor  # of the whole
    initial: tf.Tensor | None  # of the whole, which begins empty; None if it begins with it
    has_value: tf.Tensor  # True if the whole has one
    part: tf.Tensor  # value of this rank's part
    new_part: tf.Tensor  # to be fed
    set_part: tf.Operation
    release: tf.Operation  # frees the whole


class DividedSlots:
    """The slots of divided updates, and this rank's parts, in one session."""

    def __init__(
        self, communicator: hostopt.Communicator, updates: Sequence[_Update] = ()
    ) -> None:
        self._communicator = communicator
        self._variables = [update.variable for update in updates]
        whole = [each for update in updates for each in update.slots]
        self.names = {each.op.name for each in whole}
        self._slots = [_slot(each, communicator) for each in whole]
        self._is_gathered = False

    def initialize(self, session: tf.compat.v1.Session) -> None:
        """Gives rank 0 the whole slots that no checkpoint has, before hooks may save them."""
        for each in self._slots if self._communicator.rank == 0 else ():
            if each.initial is not None and session.run(each.value).shape == _EMPTY:
                value = tf.get_static_value(each.initial)  # a session would keep a constant
                if value is None:
                    value = session.run(each.initial)
                _assign(session, each.whole, value)

    def divide(self, session: tf.compat.v1.Session) -> None:
        """Gives each rank its parts of the slots of rank 0. Collective: all ranks must call it."""
        for each in self._slots:  # one by one, so that no rank has all slots twice
            parts = []
            if self._communicator.rank == 0:
                flat = session.run(each.value).reshape(-1)
                size = self._communicator.size
                where = [part_of(flat.size, rank, size) for rank in range(size)]
                parts = [flat[part].tobytes() for part in where]
            data = self._communicator.scatter_bytes(parts, f"slot {each.whole.op.name!r}")
            dtype = each.new_part.dtype.as_numpy_dtype
            session.run(each.set_part, {each.new_part: np.frombuffer(data, dtype)})
            session.run(each.release)
        for variable in self._variables:  # TensorFlow uses what they leave for the gradients
            _assign(session, variable, session.run(variable))

    def gather(self, session: tf.compat.v1.Session) -> None:
        """Gives rank 0 the whole slots, to be saved. Collective: all ranks must call it.

        Raises:
          hostopt.ConfigError: the program has assigned a slot.
        """
        self.release(session)  # if nothing was trained since the last save
        for each in self._slots:
            name = each.whole.op.name
            has_value, part = session.run([each.has_value, each.part])
            if has_value:
                raise hostopt.ConfigError(
                    f"slot {name!r} was assigned during the training, which has only parts of it "
                    "with shard_optimizer=True. Assign it before, by a checkpoint, or leave "
                    "shard_optimizer out"
                )
            parts = self._communicator.gather_bytes(part.tobytes(), f"slot {name!r}")
            if parts:
                _assign(session, each.whole, np.frombuffer(b"".join(parts), part.dtype))
                self._is_gathered = True

    def release(self, session: tf.compat.v1.Session) -> None:
        """Frees the whole slots of rank 0, after a save."""
        if self._is_gathered:
            session.run([each.release for each in self._slots])
            self._is_gathered = False


def divide_updates(
    targets: Sequence[tf.Operation], communicator: hostopt.Communicator
) -> tuple[list[tf.Operation], DividedSlots]:
    """Divides the updates of a step. Collective: all ranks must call it.

    Args:
      targets: what the step runs.

    Returns:
      The ends of the divided updates, which the step must run, too; and their slots.
    """
    updates = _find(targets, communicator.size)
    specs = {each.variable.op.name: str(_spec(each.variable)) for each in updates}
    communicator.check_same(specs, "the updates that the ranks divide")
    _log.info("the ranks divide the updates of %d variables: %s", len(specs), ", ".join(specs))
    with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("divided_slots"):
        slots = DividedSlots(communicator, updates)
    groups: dict[Any, list[_Update]] = {}
    for each in updates:
        groups.setdefault((each.level, each.variable.dtype), []).append(each)
    return [end for group in groups.values() for end in _divide(group, communicator)], slots


def _find(targets: Sequence[tf.Operation], count: int) -> list[_Update]:
    order = walk(targets)
    step = set(order)
    variables = {v.handle.op: v for v in tf.compat.v1.global_variables() if hasattr(v, "handle")}
    found: list[_Update] = []
    levels: dict[tf.Operation, int] = {}
    for op in order:
        levels[op] = max((levels.get(each, 0) for each in runs_before(op)), default=0)
        if not op.type.startswith(_KERNELS) or control_flow_context(op) is not None:
            continue
        handles = [tensor.op for _, tensor, is_handle in arguments(op) if is_handle]
        variable, *slots = map(variables.get, handles)
        if _can_divide(op, variable, slots, step, count):
            found.append(_Update(op, variable, slots, levels[op]))
            levels[op] += 1
    return sorted(found, key=lambda each: each.variable.op.name)


def _can_divide(
    op: tf.Operation,
    variable: tf.Variable | None,
    slots: Sequence[tf.Variable | None],
    step: Collection[tf.Operation],
    count: int,
) -> bool:
    """Returns True if nothing else in the step changes the variable, or uses its slots."""
    if None in (variable, *slots) or not variable.device.endswith(HOST_DEVICE):
        return False
    if not control_outputs(op):  # a hook may run it by itself, without [U4]
        return False
    size = variable.shape.num_elements() or 0
    parts = [part_of(size, index, count) for index in range(count)]
    is_large = size * variable.dtype.size >= _MIN_BYTES and all(p.start < p.stop for p in parts)
    changes = [each for each in users(variable.handle) if each in step and each.type not in READS]
    uses = [[each for each in users(slot.handle) if each in step] for slot in slots]
    has_shape = all(slot.shape == variable.shape for slot in slots)
    return is_large and has_shape and all(each == [op] for each in (changes, *uses))


def _divide(group: Sequence[_Update], communicator: hostopt.Communicator) -> list[tf.Operation]:
    """Divides updates that do not wait for each other, and returns their ends."""
    waiting = [control_outputs(each.op) for each in group]
    divided = DividedUpdate(communicator, [_spec(each.variable) for each in group])
    with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("divided_updates"):
        new = call_in_background(  # [U3]
            abort_on_error(communicator, lambda *parts: divided.join(parts)),
            [_use_part(each, communicator) for each in group],
            [each.variable.dtype.base_dtype for each in group],
            "join",
        )
        ends = [
            tf.raw_ops.AssignVariableOp(resource=update.variable.handle, value=value)  # [U4]
            for update, value in zip(group, new)
        ]
    for end, after in zip(ends, waiting):
        for op in after:
            add_control_inputs(op, [end])
    return ends


def _use_part(update: _Update, communicator: hostopt.Communicator) -> tf.Tensor:
    """Makes an update change this rank's part of the variable and slots; returns its result."""
    ops, op, variable = tf.raw_ops, update.op, update.variable
    dtype = variable.dtype.base_dtype
    copy = _part_variable(variable, communicator)
    old = _part(ops.ReadVariableOp(resource=variable.handle, dtype=dtype), variable, communicator)
    add_control_inputs(op, [ops.AssignVariableOp(resource=copy, value=old)])  # [U1]
    parts = {variable.handle.op: copy}
    parts |= {each.handle.op: _part_variable(each, communicator) for each in update.slots}
    for index, tensor in enumerate(op.inputs):
        if tensor.op in parts:
            replace_input(op, index, parts[tensor.op])
    index = _gradient(op)
    gradient = _part(op.inputs[index], variable, communicator)
    # of unknown shape, as TensorFlow compares the shapes of inputs that replace each other
    replace_input(op, index, ops.PlaceholderWithDefault(input=gradient, shape=None))
    with tf.control_dependencies([op]):  # [U2]
        return ops.ReadVariableOp(resource=copy, dtype=dtype)


def _assign(session: tf.compat.v1.Session, variable: tf.Variable, value: np.ndarray) -> None:
    """Assigns a value in memory that the system gets back when it is freed.

    TensorFlow's allocator never returns memory, and that of C often does not.
    """
    memory = np.frombuffer(mmap.mmap(-1, value.nbytes), value.dtype).reshape(variable.shape)
    np.copyto(memory, value.reshape(variable.shape))
    assign(session, [variable], [memory])


def _slot(slot: tf.Variable, communicator: hostopt.Communicator) -> _Slot:
    ops, handle = tf.raw_ops, _part_variable(slot, communicator)
    dtype = slot.dtype.base_dtype
    part = ops.ReadVariableOp(resource=handle, dtype=dtype)
    new_part = tf.compat.v1.placeholder(dtype, part.shape)
    return _Slot(
        slot,
        ops.ReadVariableOp(resource=slot.handle, dtype=dtype),
        _begin_empty(slot),
        ops.VarIsInitializedOp(resource=slot.handle),
        part,
        new_part,
        ops.AssignVariableOp(resource=handle, value=ops.DeepCopy(x=new_part)),
        ops.DestroyResourceOp(resource=slot.handle, ignore_lookup_error=True),
    )


def _begin_empty(slot: tf.Variable) -> tf.Tensor | None:
    """Makes the initializer of a slot assign a value without elements; returns the real one."""
    initializer = slot.initializer
    if initializer.type != "AssignVariableOp":
        return None
    initial = initializer.inputs[1]
    empty = tf.zeros(_EMPTY, slot.dtype.base_dtype)
    # of unknown shape: it may be fed with a whole slot
    replace_input(initializer, 1, tf.raw_ops.PlaceholderWithDefault(input=empty, shape=None))
    return initial


def _part_variable(variable: tf.Variable, communicator: hostopt.Communicator) -> tf.Tensor:
    """Returns the handle of a variable of ours for this rank's part of another one."""
    part = part_of(variable.shape.num_elements(), communicator.rank, communicator.size)
    return tf.raw_ops.VarHandleOp(
        dtype=variable.dtype.base_dtype,
        shape=[part.stop - part.start],
        shared_name=f"divided_updates/{variable.op.name}",
    )


def _part(
    value: tf.Tensor, variable: tf.Variable, communicator: hostopt.Communicator
) -> tf.Tensor:
    size = variable.shape.num_elements()
    return tf.reshape(value, [-1])[part_of(size, communicator.rank, communicator.size)]


def _gradient(op: tf.Operation) -> int:
    """Returns the index of the gradient among the inputs of an update."""
    names = [name for name, _, _ in arguments(op)]
    return names.index("delta" if "delta" in names else "grad")


def _spec(variable: tf.Variable) -> TensorSpec:
    dtype = np.dtype(variable.dtype.base_dtype.as_numpy_dtype)
    return TensorSpec(variable.op.name, tuple(variable.shape.as_list()), dtype)
