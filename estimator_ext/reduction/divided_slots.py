"""The slots of updates that the ranks divide: each rank has the part that it updates.

The slots of the program have no values while it trains. Rank 0 has all of them while it saves: a
checkpoint is the same as without divided updates. The parts are

    on one host        slices of memory that the ranks share, so that any rank can read a slot
                       between two updates (`locked_reads`), and rank 0 saves what is in it
    on several hosts   in memory of each rank, so that reading a slot is an error; rank 0 gathers
                       one slot after another to save them
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import replace_input
from estimator_ext.variables.sync_on_read import assign
from hostopt.collectives import shared_file
from hostopt.collectives.call import Array
from hostopt.collectives.host_memory import BLOCK_BYTES
from hostopt.collectives.shared_memory import channel_bytes
from hostopt.gradients.bucket import ALIGNMENT_BYTES, padded
from hostopt.gradients.divided_update import DividedUpdate
from hostopt.tensorflow.checksums import in_parts, nbytes_of

_log = tf.get_logger()

EMPTY = (0,)  # shape of a value that has been taken away


class DividedVariable(NamedTuple):
    """A variable of which each rank updates a part."""

    variable: tf.Variable
    slots: Sequence[tf.Variable]
    parts: list[slice]  # by rank, of its elements
    shape: list[int]  # of this rank's part


class _Slot:
    """A slot of the program, the whole, of which each rank has a part."""

    def __init__(self, whole: tf.Variable, shape: list[int]) -> None:
        ops = tf.raw_ops
        self.whole = whole
        self.dtype = whole.dtype.base_dtype
        self.name = f"slot {whole.op.name!r}"
        self.handle_of_part = part_variable(whole, shape)
        self.value = ops.ReadVariableOp(resource=whole.handle, dtype=self.dtype)
        self.has_value = ops.VarIsInitializedOp(resource=whole.handle)
        self.initial: tf.Tensor | None = None  # of the whole, which begins empty then
        if whole.initializer.type == "AssignVariableOp":
            self.initial = whole.initializer.inputs[1]
            # it may be fed with a whole slot
            replace_input(whole.initializer, 1, of_unknown_shape(tf.zeros(EMPTY, self.dtype)))
        self.release = ops.DestroyResourceOp(resource=whole.handle, ignore_lookup_error=True)


class _PrivateSlot(_Slot):
    """A slot of ranks on several hosts."""

    def __init__(self, whole: tf.Variable, parts: list[slice], shape: list[int]) -> None:
        super().__init__(whole, shape)
        ops = tf.raw_ops
        self._parts = parts  # by rank
        self.value_of_part = ops.ReadVariableOp(resource=self.handle_of_part, dtype=self.dtype)
        self._new_part = tf.compat.v1.placeholder(self.dtype, shape)
        self.set_part = ops.AssignVariableOp(
            resource=self.handle_of_part, value=ops.DeepCopy(x=self._new_part)
        )

    def scatter(
        self, value: Array | None, communicator: hostopt.Communicator
    ) -> dict[tf.Tensor, Array]:
        """Returns the value of the placeholder of `set_part`, from the whole slot of rank 0."""
        parts = []
        if value is not None:
            flat = value.reshape(-1)
            parts = [flat[part].tobytes() for part in self._parts]
        data = communicator.scatter_bytes(parts, self.name)
        part = np.frombuffer(data, self.dtype.as_numpy_dtype)
        return {self._new_part: part.reshape(self._new_part.shape)}

    def gather(self, part: Array, communicator: hostopt.Communicator) -> Array:
        """Returns the whole slot on rank 0, and an empty array on the others."""
        parts = communicator.gather_bytes(part.tobytes(), self.name)
        return np.frombuffer(b"".join(parts), part.dtype)


class SharedSlot(_Slot):
    """A slot of ranks on one host, in memory that they share: the slot and ALIGNMENT_BYTES."""

    def __init__(
        self, whole: tf.Variable, parts: list[slice], shape: list[int], memory: Array, rank: int
    ) -> None:
        super().__init__(whole, shape)
        ops = tf.raw_ops
        more = ALIGNMENT_BYTES // memory.itemsize
        size = memory.size - more
        self.memory = memory[:size].reshape(whole.shape)
        self.read = tf.compat.v1.get_default_graph().as_graph_element(whole).op
        self.part = memory[parts[rank]]  # which this rank updates
        # TensorFlow updates a slice in place; a slice of all elements would be the array itself
        self._part_and_more = memory[parts[rank].start : parts[rank].stop + more]
        self._new_part = tf.compat.v1.placeholder(self.dtype, [None])
        part = tf.reshape(self._new_part[:-more], shape)
        self.set_part = ops.AssignVariableOp(resource=self.handle_of_part, value=part)
        # the whole slot, for reads under a lock
        self.readable = ops.VarHandleOp(
            dtype=self.dtype, shape=whole.shape, shared_name=f"divided_slots/{whole.op.name}"
        )
        self._new_whole = tf.compat.v1.placeholder(self.dtype, whole.shape)
        self.set_readable = ops.AssignVariableOp(resource=self.readable, value=self._new_whole)

    @property
    def feeds(self) -> dict[tf.Tensor, Array]:
        """Values of the placeholders of `set_part` and `set_readable`."""
        return {self._new_part: self._part_and_more, self._new_whole: self.memory}

    def close(self) -> None:
        """Frees the memory, which the graph would keep until it is collected."""
        self.memory = self.part = self._part_and_more = np.empty(0)


_S = TypeVar("_S", bound=_Slot)


class DividedSlots:
    """The slots of divided updates, and this rank's parts, in one session."""

    def __init__(
        self,
        communicator: hostopt.Communicator,
        divided: Sequence[DividedVariable] = (),
        memory: Sequence[Array] = (),
    ) -> None:
        """Makes the slots, in memory of `share_memory` if the ranks are on one host."""
        self._communicator = communicator
        self._variables = [each.variable for each in divided]
        slots = [(slot, each.parts, each.shape) for each in divided for slot in each.slots]
        rank = communicator.rank
        shared = [SharedSlot(*each, part, rank) for each, part in zip(slots, memory)]
        self.shared = {each.whole.op.name: each for each in shared}
        self._private = [] if shared else [_PrivateSlot(*each) for each in slots]
        self._slots: list[_Slot] = [*shared, *self._private]
        self.names = {each.whole.op.name for each in self._slots}
        self.updates: list[DividedUpdate] = []
        self._is_gathered = False

    # A run of a session takes long in a large graph, so each is for many slots.

    def initialize(self, session: tf.compat.v1.Session) -> None:
        """Gives rank 0 the whole slots that no checkpoint has, before hooks may save them."""
        if self._communicator.rank != 0:
            return
        for slots in _in_batches(self._slots):
            values = dict(zip(slots, session.run([each.value for each in slots])))
            new = [e for e in slots if e.initial is not None and values[e].shape == EMPTY]
            values.update(zip(new, _initial_values(session, new)))
            shared = [each for each in slots if isinstance(each, SharedSlot)]
            for each in shared:
                np.copyto(each.memory, values[each].reshape(each.memory.shape))
            if shared:
                self._assign_shared(session, shared)
                session.run([e.set_readable for e in shared], _merged(e.feeds for e in shared))
            else:
                _assign(session, [each.whole for each in new], [values[each] for each in new])

    def divide(self, session: tf.compat.v1.Session) -> None:
        """Gives each rank its parts of the slots of rank 0. Collective: all ranks must call it."""
        if self.shared:  # rank 0 has filled the memory
            self._communicator.barrier("the slots")
        for shared in _in_batches(list(self.shared.values())):
            operations = [op for each in shared for op in (each.set_part, each.set_readable)]
            session.run(operations, _merged(each.feeds for each in shared))
        for slots in _in_batches(self._private):
            values: Sequence[Array | None] = [None] * len(slots)
            if self._communicator.rank == 0:
                values = session.run([each.value for each in slots])
            feeds = [each.scatter(v, self._communicator) for each, v in zip(slots, values)]
            session.run([each.set_part for each in slots], _merged(feeds))
            session.run([each.release for each in slots])  # no rank has all slots twice
        session.run([each.release for each in self.shared.values()])
        for part in in_parts(self._variables):  # TensorFlow uses what they leave for the gradients
            _assign(session, part, session.run(part))
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc
        if trim is not None:  # malloc returns what it keeps to the system
            trim(0)

    def gather(self, session: tf.compat.v1.Session) -> None:
        """Gives rank 0 the whole slots, to be saved. Collective: all ranks must call it.

        Raises:
          hostopt.ConfigError: the program has assigned a slot.
        """
        self.release(session)  # if nothing was trained since the last save
        are_assigned = session.run([each.has_value for each in self._slots])
        for each, is_assigned in zip(self._slots, are_assigned):
            if is_assigned:
                raise hostopt.ConfigError(
                    f"{each.name} was assigned during the training, when each rank has a part, "
                    "as the ranks divide its updates. Assign it before, by a checkpoint, or pass "
                    "shard_optimizer=False"
                )
        for slots in _in_batches(self._private):
            parts = session.run([each.value_of_part for each in slots])
            whole = [each.gather(part, self._communicator) for each, part in zip(slots, parts)]
            if self._communicator.rank == 0:
                _assign(session, [each.whole for each in slots], whole)
        if self._communicator.rank == 0:
            for shared in _in_batches(list(self.shared.values())):
                self._assign_shared(session, shared)
        self._is_gathered = self._communicator.rank == 0

    def _assign_shared(self, session: tf.compat.v1.Session, shared: Sequence[SharedSlot]) -> None:
        assign(session, [each.whole for each in shared], [each.memory for each in shared])

    @property
    def _advice(self) -> str:
        if self.shared:  # by its name, or by a Saver that is older than the division
            return "Fetch the variable itself, save with a Saver made in the begin of a hook"
        return "Read it from a checkpoint"

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Scope that says why a slot could not be read."""
        try:
            yield
        except tf.errors.FailedPreconditionError as error:
            for name in self.names:
                if f" {name} " in str(error) or f" {name}." in str(error):
                    raise hostopt.ConfigError(
                        f"slot {name!r} has no value during the training, as the ranks divide its "
                        f"updates. {self._advice}, or pass shard_optimizer=False"
                    ) from error
            raise

    def close(self) -> None:
        """Frees the memory of the updates."""
        for update in self.updates:
            update.close()
        for slot in self.shared.values():
            slot.close()

    def release(self, session: tf.compat.v1.Session) -> None:
        """Frees the whole slots of rank 0, after a save."""
        if self._is_gathered:
            session.run([each.release for each in self._slots])
            self._is_gathered = False


def share_memory(
    divided: Sequence[DividedVariable], communicator: hostopt.Communicator
) -> list[Array] | None:
    """Shares memory for all slots among the ranks of one host.

    Collective: all ranks must call it. Each array is flat, and followed by ALIGNMENT_BYTES.
    Returns None if there is too little for them, or for what the step shares: the variables, the
    sums of their gradients, and the channel of the sums.
    """
    slots = [slot for each in divided for slot in each.slots]
    sizes = [nbytes_of(slot) + ALIGNMENT_BYTES for slot in slots]
    *starts, end = [0, *itertools.accumulate(map(padded, sizes))]
    host = communicator.memory
    if not divided or host is None:
        return []
    memory = host.allocate(max(end, 1))  # an optimizer may have no slots
    of_step = 2 * sum(nbytes_of(each.variable) for each in divided)
    of_step += channel_bytes(communicator.size, BLOCK_BYTES)
    if memory is None or host.allocate(of_step) is None:
        if communicator.rank == 0:
            _log.warning(
                "each rank makes all updates, as dividing them takes %d bytes of %s. Enlarge it "
                "(in Docker: --shm-size)",
                end + of_step,
                shared_file.DIRECTORY,
            )
        return None
    flat = np.frombuffer(memory, np.uint8)
    return [
        flat[start : start + size].view(slot.dtype.base_dtype.as_numpy_dtype)
        for start, size, slot in zip(starts, sizes, slots)
    ]


def _in_batches(slots: Sequence[_S]) -> Iterator[list[_S]]:
    by_variable = {each.whole.ref(): each for each in slots}
    for part in in_parts([each.whole for each in slots]):
        yield [by_variable[each.ref()] for each in part]


def _merged(feeds: Iterable[dict[tf.Tensor, Array]]) -> dict[tf.Tensor, Array]:
    return {tensor: value for feed in feeds for tensor, value in feed.items()}


def _initial_values(session: tf.compat.v1.Session, slots: Sequence[_Slot]) -> list[Array]:
    tensors = [each.initial for each in slots]
    values = [tf.get_static_value(each) for each in tensors]  # a session would keep a constant
    others = iter(session.run([e for e, value in zip(tensors, values) if value is None]))
    return [next(others) if value is None else value for value in values]


def _assign(
    session: tf.compat.v1.Session, variables: Sequence[tf.Variable], values: Sequence[Array]
) -> None:
    """Assigns values in memory that the system gets back when it is freed.

    TensorFlow's allocator never returns its memory to the system, and malloc often keeps it.
    """
    copies = []
    for variable, value in zip(variables, values):
        memory = mmap.mmap(-1, max(value.nbytes, 1))
        copies.append(np.frombuffer(memory, value.dtype, value.size).reshape(variable.shape))
        np.copyto(copies[-1], value.reshape(variable.shape))
    assign(session, variables, copies)


def part_variable(variable: tf.Variable, shape: list[int]) -> tf.Tensor:
    """Returns the handle of a variable of ours for this rank's part of another one."""
    return tf.raw_ops.VarHandleOp(
        dtype=variable.dtype.base_dtype,
        shape=shape,
        shared_name=f"divided_updates/{variable.op.name}",
    )


def of_unknown_shape(value: tf.Tensor) -> tf.Tensor:
    """Hides the shape of a tensor, so that it can replace an input of another shape."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=None)
