"""The model of each rank between synchronisations, and its synchronisation with the others.

    local     variables of this rank, which its own steps have changed
    anchor    the same variables after the last synchronisation, the same on all ranks
    mean      weighted mean over the ranks of (local - anchor)

A synchronisation replaces `local` and `anchor` on all ranks by `anchor + mean`, the weighted mean
of the ranks. With an outer optimizer, trained variables become `outer(anchor, gradient=-mean)`
instead (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
Models").

A fragment is a part of the model that is synchronised by itself, one after the other, so that the
traffic is even (Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"). If the
reduction runs in the background, this rank's steps meanwhile are kept: its variables change by the
difference between their synchronised values and those that were sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from zlib_ng.zlib_ng import crc32

import hostopt
from estimator_ext.desync import checksum
from estimator_ext.local_steps import LocalSteps
from estimator_ext.outer_step import OuterStep
from estimator_ext.replica_part import Difference, ReplicaPart
from estimator_ext.sync_on_read import in_parts, is_sync_on_read

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


class Fragment(NamedTuple):
    """A part of the model that is synchronised by itself.

    Args:
      trained: trained variables.
      others: other variables whose mean is taken.
      outer: the outer step of the trained variables; None for their mean.
      reset: variables that are initialized after a synchronisation.
    """

    trained: list[ReplicaPart]
    others: list[ReplicaPart]
    outer: OuterStep | None
    reset: list[tf.Variable]

    @property
    def parts(self) -> list[ReplicaPart]:
        """All variables that are synchronised."""
        return [*self.trained, *self.others]


class Replicas:
    """The models of all ranks.

    Args:
      communicator: a `duplicate` that nothing else uses.
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
        self._compression = options.compression
        variables = find_variables(changed)
        powers = [v for v in variables.averaged if _POWER.fullmatch(v.op.name)]
        reset = [*variables.slots, *powers] if options.slots == "reset" else []
        others = [*variables.averaged, *(variables.slots if options.slots == "average" else ())]
        divisions = (
            divided(each, options.fragments) for each in (variables.trained, others, reset)
        )
        self.fragments = []
        for trained, rest, again in zip(*divisions):
            parts = self._parts(trained)
            ordered = [variable for part in parts for variable in part.variables]
            outer = new_outer(ordered) if new_outer is not None and ordered else None
            self.fragments.append(Fragment(parts, self._parts(rest), outer, again))
        self._equal = find_variables(changed).equal  # with the slots of the outer steps
        # only for the checkpoint, as they differ by rank otherwise
        self._kept = self._parts(variables.slots if options.slots == "keep" else ())

    def _parts(self, variables: Sequence[tf.Variable]) -> list[ReplicaPart]:
        by_dtype: dict[tf.DType, list[tf.Variable]] = {}
        for variable in variables:
            by_dtype.setdefault(variable.dtype.base_dtype, []).append(variable)
        return [
            ReplicaPart(self._communicator, part, self._compression)
            for same in by_dtype.values()
            for part in in_parts(same)
        ]

    def begin(self, session: tf.compat.v1.Session) -> None:
        """Reads the variables, which are the same on all ranks, as anchors.

        Args:
          session: session of this rank.
        """
        for fragment in self.fragments:
            for part in fragment.parts:
                part.read_anchor(session)
        for part in self._kept:
            part.read_anchor(session)

    def anchor_checksum(self, fragments: Sequence[Fragment]) -> int:
        """Returns a CRC-32 of the anchors, which must be the same on all ranks.

        Args:
          fragments: the fragments to be synchronised next.
        """
        value = 0
        for fragment in fragments:
            for part in fragment.parts:
                value = crc32(part.anchor.view(np.uint8), value)
        return value

    def take(
        self, session: tf.compat.v1.Session, fragments: Sequence[Fragment], step: int
    ) -> list[Difference]:
        """Returns what the steps of this rank have changed since the last synchronisation.

        Args:
          session: session of this rank.
          fragments: the fragments to be synchronised.
          step: global_step, for errors.

        Raises:
          hostopt.NonFiniteGradientError: a variable of this rank is not finite.
        """
        return [part.take(session, step) for each in fragments for part in each.parts]

    def apply(
        self,
        session: tf.compat.v1.Session,
        fragments: Sequence[Fragment],
        means: Sequence[Difference],
        *,
        is_late: bool = False,
    ) -> None:
        """Replaces the variables by the synchronised ones.

        Args:
          session: session of this rank.
          fragments: the fragments.
          means: results of `take`, reduced over the ranks.
          is_late: True if this rank has made steps since `take`, which are kept.
        """
        left = iter(means)
        for fragment in fragments:
            trained = [next(left) for _ in fragment.trained]
            if fragment.outer is not None:
                self._apply_outer(session, fragment, fragment.outer, trained, is_late)
            elif trained:
                for mean in trained:
                    mean.apply(session, is_late)
            for _ in fragment.others:
                next(left).apply(session, is_late)
            if fragment.reset:
                session.run([variable.initializer for variable in fragment.reset])
                for part in fragment.others:
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
            part.assign(session, part.anchor)
            gradients += part.split(-mean.values)
        outer.run(session, gradients)
        for part, made in zip(fragment.trained, progress):
            part.read_anchor(session)
            if made is not None:
                part.assign_local(session, part.anchor + made)

    def complete(self, session: tf.compat.v1.Session, weight: float, step: int) -> None:
        """Averages slots that ranks keep, and compares what must be the same, for a checkpoint.

        Collective: all ranks must call it.

        Args:
          session: session of this rank.
          weight: weight of this rank; the weights of all ranks add up to 1.
          step: global_step, for errors.

        Raises:
          hostopt.CollectiveMismatchError: a variable that must be the same differs by rank.
        """
        for part in self._kept:
            difference = part.take(session, step)
            difference.reduce(weight, is_whole=True)
            difference.apply(session, is_late=False)
        values, text = session.run(self._equal), "the variables that no step changes"
        table = {v.op.name: f"{checksum(value):08x}" for v, value in zip(self._equal, values)}
        self._communicator.check_same(table, text)


def divided(variables: Sequence[tf.Variable], count: int) -> list[list[tf.Variable]]:
    """Divides variables into fragments of similar size; some may be empty.

    Args:
      variables: the variables.
      count: number of fragments.
    """
    fragments: list[list[tf.Variable]] = [[] for _ in range(count)]
    sizes = [0] * count
    for variable in sorted(variables, key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        fragments[smallest].append(variable)
        sizes[smallest] += _size(variable)
    return fragments


def _size(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() or 0)
