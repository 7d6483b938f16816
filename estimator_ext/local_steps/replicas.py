"""The model of each rank between synchronisations, and its synchronisation with the others.

    local     variables of this rank, which its own steps have changed
    anchor    the same variables after the last synchronisation, the same on all ranks
    mean      weighted mean over the ranks of (anchor - local)

A synchronisation replaces `local` and `anchor` on all ranks by `anchor - mean`, the weighted mean
of the ranks. With an outer optimizer, trained variables become `outer(anchor, gradient=mean)`
instead (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
Models").

A fragment is a part of the model that is synchronised by itself, one after the other, so that the
traffic is even (Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"). If the
reduction runs in the background, this rank's steps meanwhile are kept: its variables change by the
difference between their synchronised values and those that were sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from zlib_ng.zlib_ng import crc32

import hostopt
from estimator_ext.local_steps.outer_step import OuterStep
from estimator_ext.local_steps.replica_part import Difference, ReplicaPart
from estimator_ext.strategy.local_steps import LocalSteps
from estimator_ext.variables.desync import checksum
from estimator_ext.variables.sync_on_read import assign, in_parts, is_sync_on_read

_NO_NUMBERS = (tf.string, tf.resource, tf.variant)
_POWER = re.compile(r"(.*/)?beta\d_power(_\d+)?")  # of Adam, which counts steps in it
_EMA = re.compile(r".*/ExponentialMovingAverage(_\d+)?")  # has the name of a slot


class Variables(NamedTuple):
    """The variables of a training, by what a synchronisation does with them.

    Args:
      slots: slots of the optimizer.
      powers: counters of steps that an optimizer keeps as powers.
      averaged: other variables that the steps change, such as moving averages.
      largest: integers that the steps change, such as counters.
      equal: variables that must be the same on all ranks.
    """

    trained: list[tf.Variable]
    slots: list[tf.Variable]
    powers: list[tf.Variable]
    averaged: list[tf.Variable]
    largest: list[tf.Variable]
    equal: list[tf.Variable]


def find_variables(changed: Collection[str]) -> Variables:
    """Returns the global variables of the default graph.

    Args:
      changed: names of the variables that a step changes.

    Raises:
      hostopt.ConfigError: a variable cannot be synchronised.
    """
    found = Variables([], [], [], [], [], [])
    every = [*tf.compat.v1.global_variables(), *tf.compat.v1.trainable_variables()]
    trained = {v.op.name: v.shape for v in tf.compat.v1.trainable_variables()}
    global_step = tf.compat.v1.train.get_global_step()
    for name, variable in sorted({v.op.name: v for v in every}.items()):
        is_skipped = variable is global_step or is_sync_on_read(variable)
        if not is_skipped and variable.dtype.base_dtype not in _NO_NUMBERS:
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


class Fragment(NamedTuple):
    """A part of the model that is synchronised by itself.

    Args:
      others: other variables whose mean is taken.
      outer: the outer step of the trained variables; None for their mean.
      reset: variables that are initialized after a synchronisation.
    """

    trained: list[ReplicaPart]
    others: list[ReplicaPart]
    powers: list[ReplicaPart]
    outer: OuterStep | None
    reset: list[tf.Variable]

    @property
    def parts(self) -> list[ReplicaPart]:
        """All variables that are synchronised."""
        return [*self.trained, *self.others, *self.powers]


class Replicas:
    """The models of all ranks.

    Args:
      options: when ranks synchronise, and how.
      changed: names of the variables that a step changes.
      new_outer: builds the outer step of variables; None for the mean.

    Attributes:
      fragments: the parts of the model, each synchronised by itself.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        options: LocalSteps,
        changed: Collection[str],
        new_outer: Callable[[Sequence[tf.Variable]], OuterStep] | None,
    ) -> None:
        self._communicator = communicator
        variables, rule = find_variables(changed), options.slot_rule
        self.fragments = []
        for trained, others in divided(variables, options.sync_fragments, rule == "average"):
            parts = self._parts(trained, options.sync_compression)
            ordered = [variable for part in parts for variable in part.variables]
            outer = new_outer(ordered) if new_outer is not None and ordered else None
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
    ) -> list[ReplicaPart]:
        by_dtype: dict[tf.DType, list[tf.Variable]] = {}
        for variable in variables:
            by_dtype.setdefault(variable.dtype.base_dtype, []).append(variable)
        return [
            ReplicaPart(self._communicator, part, compression)
            for same in by_dtype.values()
            for part in in_parts(same)
        ]

    def begin(self, session: tf.compat.v1.Session) -> None:
        """Reads the variables, which are the same on all ranks, as anchors.

        Raises:
          hostopt.NonFiniteGradientError: a variable is not finite.
        """
        of_fragments = [part for fragment in self.fragments for part in fragment.parts]
        for part in (*of_fragments, *self._kept):
            part.read_first_anchor(session)

    def anchor_checksum(self, fragment: Fragment) -> int:
        """Returns a CRC-32 of the anchors, which must be the same on all ranks.

        Args:
          fragment: the fragment to be synchronised next.
        """
        value = 0
        for part in fragment.parts:
            value = crc32(part.anchor.view(np.uint8), value)
        return value

    def take(
        self, session: tf.compat.v1.Session, fragment: Fragment, step: int
    ) -> list[Difference]:
        """Returns what the steps of this rank have changed since the last synchronisation.

        Raises:
          hostopt.NonFiniteGradientError: a variable of this rank is not finite.
        """
        return [part.take(session, step) for part in fragment.parts]

    def apply(
        self,
        session: tf.compat.v1.Session,
        fragment: Fragment,
        means: Sequence[Difference],
        step: int,
        *,
        is_late: bool = False,
    ) -> None:
        """Replaces the variables by the synchronised ones.

        Args:
          means: results of `take`, reduced over the ranks.
          is_late: True if this rank has made steps since `take`. It keeps the steps of trained
            variables, but not of others, as an average of squares could become negative.

        Raises:
          hostopt.NonFiniteGradientError: a synchronised variable is not finite.
        """
        left = iter(means)
        trained = [next(left) for _ in fragment.trained]
        if fragment.outer is not None:
            self._apply_outer(session, fragment, fragment.outer, trained, is_late)
        else:
            for mean in trained:
                mean.apply(session, is_late)
        for _ in fragment.others:
            next(left).apply(session, is_late=False)
        for _ in fragment.powers:
            next(left).apply(session, is_late)
        for part in fragment.parts:
            part.check_anchor(step)
        if fragment.reset:
            session.run([variable.initializer for variable in fragment.reset])
            for part in (*fragment.others, *fragment.powers):
                part.read_anchor(session)

    def _apply_outer(
        self,
        session: tf.compat.v1.Session,
        fragment: Fragment,
        outer: OuterStep,
        means: Sequence[Difference],
        is_late: bool,
    ) -> None:
        progress = [mean.progress(session) if is_late else None for mean in means]
        gradients = []
        for part, mean in zip(fragment.trained, means):
            part.assign_local(session, part.anchor)
            gradients += part.split(mean.values)
        outer.run(session, gradients)
        for part, change in zip(fragment.trained, progress):
            part.read_anchor(session)
            if change is not None:
                part.assign_local(session, np.add(part.anchor, change, out=change))

    def complete(self, session: tf.compat.v1.Session, weight: float, step: int) -> None:
        """Averages slots that ranks keep, and compares what must be the same, for a checkpoint.

        Collective: all ranks must call it.

        Args:
          weight: weight of this rank; the weights of all ranks add up to 1.

        Raises:
          hostopt.CollectiveMismatchError: a variable that must be the same differs by rank.
        """
        for part in self._kept:
            difference = part.take(session, step)
            difference.reduce(weight, is_whole=True)
            difference.apply(session, is_late=False)
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

    Args:
      has_slots: True to put slots beside their variables, False to leave them out.

    Returns:
      Trained variables and others of each fragment.
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
