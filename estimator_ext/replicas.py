"""The model of each rank between synchronisations, and its synchronisation with the others.

    local     variables of this rank, which its own steps have changed
    anchor    the same variables after the last synchronisation, the same on all ranks
    mean      weighted mean over the ranks of (local - anchor)

A synchronisation replaces `local` and `anchor` on all ranks by `anchor + mean`, the weighted mean
of the ranks. With an outer optimizer, trained variables become `outer(anchor, gradient=-mean)`
instead (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
Models").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from zlib_ng.zlib_ng import crc32

import hostopt
from estimator_ext.desync import checksum
from estimator_ext.local_steps import LocalSteps
from estimator_ext.outer_step import OuterStep
from estimator_ext.sync_on_read import assign, in_parts, is_sync_on_read
from hostopt.collectives.finite import all_finite
from hostopt.collectives.wire_format import WireFormat, new_wire_format
from hostopt.gradients.quantized import NAMES as QUANTIZED
from hostopt.gradients.quantized import QuantizedSum

__all__: list[str] = []

_NO_NUMBERS = (tf.string, tf.resource, tf.variant)
_POWER = re.compile(r"(.*/)?beta\d_power(_\d+)?")  # of Adam, which counts steps in it


class Variables(NamedTuple):
    """The variables of a training, by what a synchronisation does with them.

    Args:
      trained: trainable variables.
      slots: slots of the optimizer.
      averaged: other variables that the steps change, such as moving averages.
      equal: variables that must be the same on all ranks.
    """

    trained: list[tf.Variable]
    slots: list[tf.Variable]
    averaged: list[tf.Variable]
    equal: list[tf.Variable]


def find_variables(changed: Collection[str]) -> Variables:
    """Returns the global variables of the default graph.

    Args:
      changed: names of the variables that a step changes.
    """
    found = Variables([], [], [], [])
    every = [*tf.compat.v1.global_variables(), *tf.compat.v1.trainable_variables()]
    trained = {v.op.name: v.shape.as_list() for v in tf.compat.v1.trainable_variables()}
    global_step = tf.compat.v1.train.get_global_step()
    for name, variable in sorted({v.op.name: v for v in every}.items()):
        is_skipped = variable is global_step or is_sync_on_read(variable)
        if is_skipped or variable.dtype.base_dtype in _NO_NUMBERS:
            continue
        is_changed = variable.dtype.is_floating and name in changed
        if variable.dtype.is_floating and name in trained:
            found.trained.append(variable)
        elif is_changed and trained.get(_owner(name, trained)) == variable.shape.as_list():
            found.slots.append(variable)
        else:
            (found.averaged if is_changed else found.equal).append(variable)
    return found


def _owner(name: str, trained: Collection[str]) -> str:
    """Returns the longest name of a trained variable that a slot's name contains as its scope."""
    parts = name.split("/")
    scopes = ["/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts))]
    return max((scope for scope in scopes if scope in trained), key=len, default="")


class Replicas:
    """The models of all ranks.

    Args:
      communicator: a `duplicate` that nothing else uses.
      options: when ranks synchronise, and how.
      variables: the variables of the training.
      outer: the outer step; None for the mean.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        options: LocalSteps,
        variables: Variables,
        outer: OuterStep | None,
    ) -> None:
        self._communicator = communicator
        self._outer = outer
        self._equal = variables.equal
        powers = [v for v in variables.averaged if _POWER.fullmatch(v.op.name)]
        self._reset = [*variables.slots, *powers] if options.slots == "reset" else []
        others = [*variables.averaged, *(variables.slots if options.slots == "average" else ())]
        self._trained = self._parts(variables.trained, options.compression)
        self._others = self._parts(others, options.compression)
        # only for the checkpoint, as they differ by rank otherwise
        kept = variables.slots if options.slots == "keep" else ()
        self._kept = self._parts(kept, options.compression)

    def _parts(self, variables: Sequence[tf.Variable], compression: str | None) -> list[_Part]:
        by_dtype: dict[Any, list[tf.Variable]] = {}
        for variable in variables:
            by_dtype.setdefault(variable.dtype.base_dtype, []).append(variable)
        return [
            _Part(self._communicator, part, compression)
            for same in by_dtype.values()
            for part in in_parts(same)
        ]

    def begin(self, session: tf.compat.v1.Session) -> None:
        """Reads the variables, which are the same on all ranks, as anchors.

        Args:
          session: session of this rank.
        """
        for part in (*self._trained, *self._others, *self._kept):
            part.read_anchor(session)

    def anchor_checksum(self) -> int:
        """Returns a CRC-32 of all anchors that must be the same on all ranks."""
        value = 0
        for part in (*self._trained, *self._others):
            value = crc32(part.anchor.view(np.uint8), value)
        return value

    def synchronise(
        self, session: tf.compat.v1.Session, weight: float, step: int, *, is_full: bool
    ) -> None:
        """Synchronises the variables of all ranks. Collective: all ranks must call it.

        Args:
          session: session of this rank.
          weight: weight of this rank; the weights of all ranks add up to 1.
          step: global_step, for errors.
          is_full: True before a checkpoint, which must hold all that the ranks know: nothing is
            left out of the sums, and slots that ranks keep are averaged, too.

        Raises:
          hostopt.NonFiniteGradientError: a variable of this rank is not finite.
          hostopt.CollectiveMismatchError: a variable that must be the same differs by rank.
        """
        gradients: list[Any] = []
        for part in self._trained:
            mean = part.mean(session, weight, step, is_full)
            if self._outer is None:
                part.assign(session, part.anchor + mean)
            else:
                part.assign(session, part.anchor)
                gradients += part.split(-mean)
        if self._outer is not None:
            self._outer.run(
                session, [v for part in self._trained for v in part.variables], gradients
            )
            for part in self._trained:
                part.read_anchor(session)
        for part in (*self._others, *(self._kept if is_full else ())):
            part.assign(session, part.anchor + part.mean(session, weight, step, is_full))
        if self._reset:
            session.run([variable.initializer for variable in self._reset])
            for part in self._others:
                part.read_anchor(session)
        if is_full:
            self._compare(session)

    def _compare(self, session: tf.compat.v1.Session) -> None:
        values, text = session.run(self._equal), "the variables that no step changes"
        table = {v.op.name: f"{checksum(value):08x}" for v, value in zip(self._equal, values)}
        self._communicator.check_same(table, text)


class _Part:
    """Variables of one dtype that are synchronised together.

    Args:
      communicator: the ring.
      variables: the variables.
      compression: format of the differences on the wire; None for none.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        variables: list[tf.Variable],
        compression: str | None,
    ) -> None:
        self.variables = variables
        self._communicator = communicator
        self._name = f"the differences of {len(variables)} variables from {variables[0].op.name!r}"
        self._dtype = variables[0].dtype.base_dtype.as_numpy_dtype
        # sums of the small dtypes are computed in float32
        self._sum_dtype = np.float64 if variables[0].dtype.base_dtype == tf.float64 else np.float32
        self._wire_format: WireFormat | None = None
        self._quantized: QuantizedSum | None = None
        if self._sum_dtype is np.float32 and compression in QUANTIZED:
            self._quantized = QuantizedSum(communicator, compression)
        elif self._sum_dtype is np.float32:
            self._wire_format = new_wire_format(compression)
        self.anchor = np.empty(0, self._sum_dtype)

    def read_anchor(self, session: tf.compat.v1.Session) -> None:
        """Reads the variables as anchor."""
        self.anchor = self._read(session)

    def _read(self, session: tf.compat.v1.Session) -> Any:
        values = session.run(self.variables)
        return np.concatenate([value.reshape(-1).astype(self._sum_dtype) for value in values])

    def split(self, flat: Any) -> list[Any]:
        """Returns the values of the variables in an array of shape [n]."""
        sizes = [variable.shape.num_elements() for variable in self.variables]
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        shapes = [variable.shape.as_list() for variable in self.variables]
        return [part.reshape(shape).astype(self._dtype) for part, shape in zip(parts, shapes)]

    def assign(self, session: tf.compat.v1.Session, flat: Any) -> None:
        """Assigns values to the variables, which become the anchor."""
        values = self.split(flat)
        assign(session, self.variables, values)
        if self._dtype is not self._sum_dtype:  # the variables have rounded them
            flat = np.concatenate([each.reshape(-1).astype(self._sum_dtype) for each in values])
        self.anchor = flat

    def mean(self, session: tf.compat.v1.Session, weight: float, step: int, is_full: bool) -> Any:
        """Returns the weighted mean over the ranks of the differences from the anchor."""
        difference = self._read(session)
        difference -= self.anchor
        if not all_finite(difference):
            raise self._nonfinite(difference, step)
        difference *= weight
        if self._quantized is not None and not is_full:
            self._quantized.sum_in_place(difference, self._name)
            return difference
        if self._quantized is not None:
            difference += self._quantized.take_residual()
        call = self._communicator.next_call(self._name)
        self._communicator.all_reduce_in_place(
            difference, hostopt.ReduceOp.SUM, call, None if is_full else self._wire_format
        )
        return difference

    def _nonfinite(self, difference: Any, step: int) -> hostopt.NonFiniteGradientError:
        names = [
            variable.op.name
            for variable, value in zip(self.variables, self.split(difference))
            if not np.isfinite(value).all()
        ]
        cluster, rank = self._communicator.transport.cluster, self._communicator.rank
        return hostopt.NonFiniteGradientError(
            f"variable {names[0]!r} of {cluster.describe(rank)} is NaN or Inf at the "
            f"synchronisation after step {step}. Look at its data and its loss, lower the "
            "learning rate or clip",
            **cluster.attributes(rank),
            step=step,
        )
