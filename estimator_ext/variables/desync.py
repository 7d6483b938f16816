"""Replica consistency check: the ranks compare checksums of their variables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.variables.sync_on_read import has_numbers, in_parts

# The ranks also compare after these steps of a training, as most causes act from the start.
_FIRST_STEPS = (1, 10, 100)


class DesyncCheckHook(tf.compat.v1.train.SessionRunHook):
    """Ends the training with an error if the bits of a variable differ between ranks.

    It must come before hooks that save. It also compares after the first, tenth and hundredth step
    of the training, and at its end. Collective: all ranks must have it, with the same steps.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        variables: Sequence[tf.Variable],
        every_steps: int,
        steps_per_run: int,
        suspects: Mapping[str, str],
    ) -> None:
        self._suspects = suspects
        self._communicator = communicator
        self._variables = list(filter(has_numbers, variables))
        self._every_steps = every_steps
        self._steps_per_run = steps_per_run
        self._first_step = self._step = 0

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Stores the first step."""
        del coord
        # counted by the hook: if global_step itself differs, the ranks still compare together
        self._step = int(session.run(tf.compat.v1.train.get_global_step()))
        self._first_step = self._step

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Compares the variables if the step is one of those to compare after."""
        del run_values
        before, self._step = self._step, self._step + self._steps_per_run
        firsts = (self._first_step + number for number in _FIRST_STEPS)
        is_early = any(before < step <= self._step for step in firsts)
        if is_early or self._step // self._every_steps != before // self._every_steps:
            self._compare(run_context.session)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Compares the variables that are about to be saved."""
        self._compare(session)

    def _compare(self, session: tf.compat.v1.Session) -> None:
        local = [
            checksum(value) for part in in_parts(self._variables) for value in session.run(part)
        ]
        name = f"the checksums of the variables after step {self._step}"
        checksums = self._communicator.all_gather(np.array(local, np.uint32), name)
        differs = checksums != checksums[0]
        if differs.any():
            raise self._error(differs)

    def _error(self, differs: Any) -> hostopt.CollectiveMismatchError:
        cluster = self._communicator.transport.cluster
        names = [v.op.name for v, any_ in zip(self._variables, differs.any(0)) if any_]
        ranks = [rank for rank, any_ in enumerate(differs.any(1)) if any_]
        more = f" and {len(names) - 1} more differ" if len(names) > 1 else " differs"
        return hostopt.CollectiveMismatchError(
            f"after step {self._step} variable {names[0]!r}{more} between "
            f"{cluster.describe(0)} and {', '.join(map(cluster.describe, ranks))}, but all ranks "
            f"should have the same values. {self._cause(names)}; then resume from a checkpoint of "
            "an earlier step",
            **cluster.attributes(ranks[0]),
            step=self._step,
        )

    def _cause(self, names: Sequence[str]) -> str:
        for name in names:
            if name in self._suspects:
                return (
                    f"The likely cause is {self._suspects[name]}, from which {name!r} is updated: "
                    "make it compute the same values on all ranks"
                )
        return (
            "The step's graph shows no likely cause: look for a hook, a callback or a session.run "
            "that changes variables on one rank"
        )


def checksum(value: Any) -> int:
    """Returns the CRC-32 of the bits of an array."""
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
