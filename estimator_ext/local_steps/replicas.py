"""The model of each rank between synchronisations, and its synchronisation with the others.

    local     variables of this rank, which its own steps have changed
    anchor    the same variables after the last synchronisation, the same on all ranks
    mean      weighted mean over the ranks of (anchor - local)

A synchronisation replaces `local` and `anchor` on all ranks by `anchor - mean`, the weighted mean
of the ranks. With an outer optimizer, trained variables become `outer(anchor, gradient=mean)`
instead (DiLoCo).

A fragment is a part of the model that is synchronised by itself, one after the other, so that the
traffic is even. If the reduction runs in the background, this rank's steps meanwhile are kept: its
variables change by the difference between their synchronised values and those that were sent.
docs/local_steps.md names the papers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from zlib_ng.zlib_ng import crc32

import hostopt
from estimator_ext._tf_private import saved_as
from estimator_ext.checkpoints.saving import has_own_saver
from estimator_ext.graphs.fingerprint import read_updates
from estimator_ext.spec import operations_of_step
from estimator_ext.strategy.local_steps import LocalSteps
from estimator_ext.variables.sync_on_read import assign, is_sync_on_read
from hostopt.collectives.finite import all_finite
from hostopt.collectives.wire_format import WireFormat, new_wire_format
from hostopt.gradients.quantized import NAMES as QUANTIZED
from hostopt.gradients.quantized import QuantizedSum
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.checksums import checksum, has_numbers, in_parts

_OUTER = "outer"  # scope of the slots of outer steps in a checkpoint
_POWER = re.compile(r"(.*/)?beta\d_power(_\d+)?")  # of Adam, which counts steps in it
_EMA = re.compile(r".*/ExponentialMovingAverage(_\d+)?")  # has the name of a slot
# They compute a variable from its slots, and hardly from its value.
_FROM_SLOTS = re.compile(r"(?:^|; )((?:Resource)?(?:Sparse)?Apply(?:Ftrl(?:V2)?|AdagradDA))\(")


class Variables(NamedTuple):
    """The variables of a training, by what a synchronisation does with them."""

    trained: list[tf.Variable]
    slots: list[tf.Variable]  # of the optimizer
    powers: list[tf.Variable]  # counters of steps that an optimizer keeps as powers
    averaged: list[tf.Variable]  # others that the steps change, such as moving averages
    largest: list[tf.Variable]  # integers that the steps change, such as counters
    equal: list[tf.Variable]  # must be the same on all ranks


def find_variables(changed: Collection[str]) -> Variables:
    """Returns the global variables of the default graph; a step changes the ones named."""
    found = Variables([], [], [], [], [], [])
    every = [*tf.compat.v1.global_variables(), *tf.compat.v1.trainable_variables()]
    trained = {v.op.name: v.shape for v in tf.compat.v1.trainable_variables()}
    global_step = tf.compat.v1.train.get_global_step()
    for name, variable in sorted({v.op.name: v for v in every}.items()):
        is_skipped = variable is global_step or is_sync_on_read(variable)
        if not is_skipped and has_numbers(variable):
            # a gradient has no meaning for a whole number, even if it is called trainable
            has_gradient = name in trained and not variable.dtype.base_dtype.is_integer
            is_changed = name in changed or has_gradient
            _kind(found, variable, is_changed, trained).append(variable)
    return found


def _kind(
    found: Variables,
    variable: tf.Variable,
    is_changed: bool,
    trained: Mapping[str, tf.TensorShape],
) -> list[tf.Variable]:
    """Returns the list of `found` to which a variable belongs."""
    name, dtype = variable.op.name, variable.dtype.base_dtype
    if not is_changed:
        return found.equal
    if not (dtype.is_floating or dtype.is_integer) or not variable.shape.is_fully_defined():
        raise hostopt.ConfigError(
            f"variable {name!r} of dtype {dtype.name} and shape {variable.shape} changes in local "
            "steps, wanted floating or integer numbers of a static shape. Leave sync_every, "
            "sync_secs and outer_optimizer out"
        )
    if dtype.is_integer:
        return found.largest
    if name in trained:
        return found.trained
    if _POWER.fullmatch(name):
        return found.powers
    owner = _owner(name, trained)
    is_slot = owner and trained[owner] == variable.shape and not _EMA.fullmatch(name)
    return found.slots if is_slot else found.averaged


def _owner(name: str, trained: Collection[str]) -> str:
    """Returns the longest name of a trained variable that a slot's name contains as its scope."""
    parts = name.split("/")
    scopes = ["/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts))]
    return max((scope for scope in scopes if scope in trained), key=len, default="")


class _OuterStep:
    """Operations that apply the difference of a synchronisation as a gradient."""

    def __init__(self, strategy: Any, variables: Sequence[tf.Variable]) -> None:
        optimizer = strategy.local_steps.new_outer_optimizer()
        self._feeds: list[tf.Tensor] = []

        def build() -> tf.Operation:
            # a name scope that ends in / is used again for the next fragment
            scope = tf.compat.v1.variable_scope(_OUTER, auxiliary_name_scope=False)
            with tf.device(HOST_DEVICE), scope, tf.name_scope(f"{_OUTER}/"):
                self._feeds += [
                    tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape, "difference")
                    for v in variables
                ]
                return optimizer.apply_gradients(zip(self._feeds, variables))

        extended = strategy.extended
        with extended.separate_reduction():
            self.operation = extended.call_for_each_replica(build)
        self.operations = [feed.op for feed in self._feeds]  # whose values differ

    def run(self, session: tf.compat.v1.Session, gradients: Sequence[Any]) -> None:
        session.run(self.operation, dict(zip(self._feeds, gradients)))


# -- the synchronisation of variables ---------------------------------------------------------


@dataclass(eq=False)
class _ReplicaPart:
    """Variables of one dtype, which are synchronised as one array of shape [n]."""

    communicator: hostopt.Communicator
    variables: list[tf.Variable]
    compression: str | None

    def __post_init__(self) -> None:
        first = self.variables[0]
        self.name = f"the differences of {len(self.variables)} variables from {first.op.name!r}"
        dtype = first.dtype.base_dtype
        self._dtype = dtype.as_numpy_dtype
        # sums of the small dtypes are computed in float32
        self._sum_dtype = np.float64 if dtype == tf.float64 else np.float32
        self.wire_format: WireFormat | None = None
        self.quantized: QuantizedSum | None = None
        if self._sum_dtype is np.float32 and self.compression in QUANTIZED:
            self.quantized = QuantizedSum(self.communicator, self.compression)
        elif self._sum_dtype is np.float32:
            self.wire_format = new_wire_format(self.compression)
        self.anchor: Any = np.empty(0, self._sum_dtype)
        # anchor minus variables of this rank, later the mean over the ranks; and the variables
        self.difference: Any = None
        self._local: Any = None
        # joined in one copy, as a session copies variables that it returns
        with tf.device(HOST_DEVICE):
            values = [tf.cast(v.read_value(), self._sum_dtype) for v in self.variables]
            self._flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)

    def read(self, session: tf.compat.v1.Session) -> Any:
        return session.run(self._flat)

    def read_anchor(self, session: tf.compat.v1.Session) -> None:
        self.anchor = self.read(session)

    def read_first_anchor(self, session: tf.compat.v1.Session) -> None:
        self.read_anchor(session)
        self._check_finite(
            self.anchor,
            "is NaN or Inf before the first step, and local steps synchronise what the steps "
            "change in it. Initialize it with finite numbers, or leave sync_every, sync_secs and "
            "outer_optimizer out",
        )

    def split(self, flat: Any) -> list[Any]:
        """Returns the values of the variables in an array of shape [n], as views if possible."""
        sizes = [variable.shape.num_elements() for variable in self.variables]
        shapes = [variable.shape.as_list() for variable in self.variables]
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return [
            part.reshape(shape).astype(self._dtype, copy=False)
            for part, shape in zip(parts, shapes)
        ]

    def assign_local(self, session: tf.compat.v1.Session, flat: Any) -> Any:
        """Assigns values to the variables of this rank; returns them as the dtype rounds them.

        TensorFlow may keep the array and change it in the next step.
        """
        values = self.split(flat)
        assign(session, self.variables, values)
        if self._dtype is self._sum_dtype:
            return flat
        rounded = [each.reshape(-1).astype(self._sum_dtype, copy=False) for each in values]
        return np.concatenate(rounded)

    def check_anchor(self, step: int) -> None:
        self._check_finite(
            self.anchor,
            f"is NaN or Inf after the synchronisation at step {step}, and the variables of the "
            "ranks were finite. Lower the learning rate of the outer optimizer, or use another "
            "sync_compression",
            step=step,
        )

    def take(self, session: tf.compat.v1.Session, step: int) -> None:
        """Takes the difference, anchor minus variables, and checks that it is finite."""
        self._local = self.read(session)
        self.difference = self.anchor - self._local
        cluster, rank = self.communicator.transport.cluster, self.communicator.rank
        self._check_finite(
            self.difference,
            f"of {cluster.describe(rank)} is NaN or Inf at the synchronisation after step {step}. "
            "Look at its data and its loss, lower the learning rate or clip",
            **cluster.attributes(rank),
            step=step,
        )

    def reduce(self, weight: float, *, is_whole: bool) -> None:
        """Replaces the difference by its mean. Any thread may call it. Collective.

        The weights of all ranks add up to 1. With `is_whole` nothing is left out: there is
        no compression, and what was left out before is added.
        """
        self.difference *= self.difference.dtype.type(weight)
        if self.quantized is not None and not is_whole:
            self.quantized.sum_in_place(self.difference, self.name)
            return
        if self.quantized is not None:
            self.difference += self.quantized.take_residual()
        call = self.communicator.next_call(self.name)
        wire_format, op = None if is_whole else self.wire_format, hostopt.ReduceOp.SUM
        self.communicator.all_reduce_in_place(self.difference, op, call, wire_format)

    def progress(self, session: tf.compat.v1.Session) -> Any:
        """Returns what this rank has changed since the difference was taken."""
        local = self.read(session)
        local -= self._local
        return local

    def apply(self, session: tf.compat.v1.Session, is_late: bool) -> None:
        """Assigns the anchor minus the mean; `is_late` keeps what has changed since `take`."""
        if is_late:
            self.anchor -= self.difference
            progress = self.progress(session)
            progress += self.anchor
            self.assign_local(session, progress)
        else:
            new = np.subtract(self.anchor, self.difference, out=self.difference)
            self.anchor = self.assign_local(session, new).copy()
        self.free()

    def free(self) -> None:
        self.difference = self._local = None

    def _check_finite(self, flat: Any, text: str, **attributes: Any) -> None:
        """Raises an error with the name of the first variable that is not finite, and a text."""
        if not all_finite(flat):
            finite = (np.isfinite(value).all() for value in self.split(flat))
            name = next(v.op.name for v, good in zip(self.variables, finite) if not good)
            raise hostopt.NonFiniteGradientError(f"variable {name!r} {text}", **attributes)


class Fragment(NamedTuple):
    """A part of the model that is synchronised by itself."""

    trained: list[_ReplicaPart]
    others: list[_ReplicaPart]  # other variables whose mean is taken
    powers: list[_ReplicaPart]
    outer: _OuterStep | None  # of the trained variables; None for their mean
    reset: list[tf.Variable]  # are initialized after a synchronisation

    @property
    def parts(self) -> list[_ReplicaPart]:
        """All variables that are synchronised."""
        return [*self.trained, *self.others, *self.powers]

    def checksum(self) -> int:
        """Returns a CRC-32 of the anchors, which must be the same on all ranks."""
        value = 0
        for part in self.parts:
            value = crc32(part.anchor.view(np.uint8), value)
        return value

    def take(self, session: tf.compat.v1.Session, step: int) -> None:
        """Takes what the steps of this rank have changed since the last synchronisation."""
        for part in self.parts:
            part.take(session, step)

    def reduce(self, weight: float, *, is_whole: bool) -> None:
        """Replaces the differences by their means; see `_ReplicaPart.reduce`."""
        for part in self.parts:
            part.reduce(weight, is_whole=is_whole)

    def apply(self, session: tf.compat.v1.Session, step: int, *, is_late: bool = False) -> None:
        """Replaces the variables by the synchronised ones.

        With `is_late` this rank has made steps since `take`. Those of trained variables are kept,
        but not of others, as an average of squares could become negative.
        """
        if self.outer is not None:
            self._apply_outer(session, self.outer, is_late)
        for part in self.parts[len(self.trained) if self.outer else 0 :]:
            part.apply(session, is_late and part not in self.others)
        for part in self.parts:
            part.check_anchor(step)
        if self.reset:
            session.run([variable.initializer for variable in self.reset])
            for part in (*self.others, *self.powers):
                part.read_anchor(session)

    def _apply_outer(
        self, session: tf.compat.v1.Session, outer: _OuterStep, is_late: bool
    ) -> None:
        progress = [part.progress(session) if is_late else None for part in self.trained]
        gradients = []
        for part in self.trained:
            part.assign_local(session, part.anchor)
            gradients += part.split(part.difference)
        outer.run(session, gradients)
        for part, change in zip(self.trained, progress):
            part.free()
            part.read_anchor(session)
            if change is not None:
                part.assign_local(session, np.add(part.anchor, change, out=change))


class Replicas:
    """The models of all ranks; `changed` are names of the variables that a step changes."""

    def __init__(self, strategy: Any, changed: Collection[str]) -> None:
        self._communicator = strategy.communicator.duplicate("synchronisation of the variables")
        options: LocalSteps = strategy.local_steps
        variables, rule = find_variables(changed), options.slot_rule
        self.fragments: list[Fragment] = []
        for trained, others in divided(variables, options.sync_fragments, rule == "average"):
            parts = self._parts(trained, options.sync_compression)
            ordered = [variable for part in parts for variable in part.variables]
            has_outer = options.outer_optimizer is not None and ordered
            outer = _OuterStep(strategy, ordered) if has_outer else None
            is_first = not self.fragments
            powers = self._parts(variables.powers if is_first else ())
            reset = [*variables.slots, *variables.powers] if rule == "reset" else []
            self.fragments.append(Fragment(parts, self._parts(others), powers, outer, reset))
        # only for the checkpoint, as they differ by rank otherwise
        self._kept = self._parts(variables.slots if rule == "keep" else ())
        self._largest = variables.largest
        self._equal = find_variables(changed).equal  # with the slots of the outer steps

    def _parts(
        self, variables: Sequence[tf.Variable], compression: str | None = None
    ) -> list[_ReplicaPart]:
        by_dtype: dict[tf.DType, list[tf.Variable]] = {}
        for variable in variables:
            by_dtype.setdefault(variable.dtype.base_dtype, []).append(variable)
        return [
            _ReplicaPart(self._communicator, part, compression)
            for same in by_dtype.values()
            for part in in_parts(same)
        ]

    def begin(self, session: tf.compat.v1.Session) -> None:
        """Reads the variables, which are the same on all ranks, as anchors."""
        of_fragments = [part for fragment in self.fragments for part in fragment.parts]
        for part in (*of_fragments, *self._kept):
            part.read_first_anchor(session)

    def complete(self, session: tf.compat.v1.Session, weight: float, step: int) -> None:
        """Averages kept slots, and compares what must be equal, for a checkpoint. Collective."""
        for part in self._kept:
            part.take(session, step)
            part.reduce(weight, is_whole=True)
            part.apply(session, is_late=False)
        for variable, value in zip(self._largest, session.run(self._largest)):
            largest = self._communicator.all_reduce(
                value, hostopt.ReduceOp.MAX, f"variable {variable.op.name!r}"
            )
            assign(session, [variable], [largest])
        values, text = session.run(self._equal), "the variables that no step changes"
        table = {v.op.name: f"{checksum(value):08x}" for v, value in zip(self._equal, values)}
        self._communicator.check_same(table, text)


def divided(
    variables: Variables, count: int, has_slots: bool
) -> list[tuple[list[tf.Variable], list[tf.Variable]]]:
    """Divides variables into fragments of similar size; some may be empty.

    Returns trained variables and others of each. Slots are beside their variables, or left out.
    """
    fragments: list[tuple[list[tf.Variable], list[tf.Variable]]] = [([], []) for _ in range(count)]
    place: dict[str, int] = {}
    sizes = [0] * count
    for variable in sorted(variables.trained, key=_size, reverse=True):
        place[variable.op.name] = sizes.index(min(sizes))
        fragments[place[variable.op.name]][0].append(variable)
        sizes[place[variable.op.name]] += _size(variable)
    for variable in (*variables.averaged, *(variables.slots if has_slots else ())):
        owner = _owner(variable.op.name, place)
        fragments[place[owner] if owner else sizes.index(min(sizes))][1].append(variable)
    return fragments


def _size(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() or 0)


# -- building ----------------------------------------------------------------------------------


def build_replicas(strategy: Any, spec: Any, data: Collection[tf.Operation]) -> Replicas | None:
    """Builds the outer steps, if any; None if ranks reduce gradients in each step. Collective."""
    options, communicator = strategy.local_steps, strategy.communicator
    if not options.is_used:
        return None
    if options.outer_optimizer is not None and has_own_saver(spec):
        raise hostopt.ConfigError(
            "model_fn creates a saver, which does not save the slots of outer_optimizer. Leave "
            "the saver to the Estimator, or leave outer_optimizer out"
        )
    updates = read_updates(operations_of_step(spec), data)
    _check_optimizers(options, updates.texts)
    replicas = Replicas(strategy, updates.changes)
    texts = {**updates.texts, **options.texts()}
    for outer in (each.outer for each in replicas.fragments if each.outer is not None):
        found = read_updates([outer.operation], outer.operations).texts
        texts.update({f"{name} in the outer step": text for name, text in found.items()})
    communicator.check_same(texts, "the updates of variables")
    return replicas


def _check_optimizers(options: LocalSteps, updates: Mapping[str, str]) -> None:
    """Checks that the next step of an optimizer does not undo a synchronisation."""
    if options.slot_rule == "average" and options.outer_optimizer is None:
        return
    for name, text in updates.items():
        found = _FROM_SLOTS.search(text)
        if found:
            raise hostopt.ConfigError(
                f"{found[1]} computes variable {name!r} from its slots, so the next step would "
                "undo a synchronisation with outer_optimizer, sync_delay, or another sync_slots "
                "than 'average'. Leave them out, or use another optimizer than Ftrl and AdagradDA"
            )


def check_outer_slots(checkpoint: str) -> None:
    """Checks that a checkpoint has the slots of the outer optimizer in the default graph."""
    variables = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, f"{_OUTER}/")
    if not variables:
        return
    saved = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    missing = [name for name, _ in map(saved_as, variables) if name not in saved]
    if missing:
        raise hostopt.CheckpointError(
            f"{checkpoint} has no {missing[0]!r}, a slot of outer_optimizer: it was saved with "
            "other options. Use the same options, or start in another model_dir with "
            f"warm_start_from={checkpoint!r}"
        )
