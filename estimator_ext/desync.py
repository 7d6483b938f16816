"""Replica consistency check: the ranks compare what should be the same on all: their variables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.sync_on_read import in_parts

__all__: list[str] = []

_NO_NUMBERS = (tf.string, tf.resource, tf.variant)
# Steps of a training after which the ranks compare besides: what drifts does so from the start.
_FIRST_STEPS = (1, 10, 100)


class DesyncCheckHook(tf.compat.v1.train.SessionRunHook):
    """Ends the training if a variable has other bits on another rank; runs before what saves it.

    All ranks must have it. It compares at the end of the training too.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      variables: those that are the same on all ranks, which all ranks have in the same order.
      every_steps: how often to compare, the same on all ranks; besides after the first, tenth and
        hundredth step of the training.
      steps_per_run: steps in each run of the session.
      suspects: by name of a variable, what its updates use that may differ by rank.
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
        self._variables = [v for v in variables if v.dtype.base_dtype not in _NO_NUMBERS]
        self._every_steps = every_steps
        self._steps_per_run = steps_per_run
        self._first_step = self._step = 0

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Note the step from which all ranks count.

        Args:
          session: the session of this rank.
          coord: not used.
        """
        del coord
        # counted from here: the ranks would take part at different steps if this is what differs
        self._step = int(session.run(tf.compat.v1.train.get_global_step()))
        self._first_step = self._step

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Compare, where it is time.

        Args:
          run_context: of this step.
          run_values: not used.

        Raises:
          hostopt.CollectiveMismatchError: a variable differs.
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        del run_values
        before, self._step = self._step, self._step + self._steps_per_run
        firsts = (self._first_step + number for number in _FIRST_STEPS)
        is_early = any(before < step <= self._step for step in firsts)
        if is_early or self._step // self._every_steps != before // self._every_steps:
            self._compare(run_context.session)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Compares what is about to be saved, as all ranks have ended after the same step.

        Args:
          session: the session of this rank.

        Raises:
          hostopt.CollectiveMismatchError: a variable differs.
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        self._compare(session)

    def _compare(self, session: tf.compat.v1.Session) -> None:
        own = [
            _checksum(value) for part in in_parts(self._variables) for value in session.run(part)
        ]
        what = f"the checksums of the variables after step {self._step}"
        checksums = self._communicator.all_gather(np.array(own, np.uint32), what)
        differs = checksums != checksums[0]
        if differs.any():
            raise self._error(differs)

    def _error(self, differs: Any) -> hostopt.CollectiveMismatchError:
        tasks = self._communicator.transport.cluster.ring
        names = [v.op.name for v, any_ in zip(self._variables, differs.any(0)) if any_]
        ranks = [rank for rank, any_ in enumerate(differs.any(1)) if any_]
        more = f" and {len(names) - 1} more differ" if len(names) > 1 else " differs"
        return hostopt.CollectiveMismatchError(
            f"after step {self._step} variable {names[0]!r}{more} between rank 0 ({tasks[0]}) and "
            f"{', '.join(f'rank {rank} ({tasks[rank]})' for rank in ranks)}, but all ranks should "
            f"have the same values. {self._cause(names)}; then resume from a checkpoint of an "
            "earlier step",
            rank=ranks[0],
            task=tasks[ranks[0]].name,
            address=tasks[ranks[0]].address,
            step=self._step,
        )

    def _cause(self, names: Sequence[str]) -> str:
        for name in names:
            if name in self._suspects:
                return (
                    f"The likely cause is {self._suspects[name]}, from which {name!r} is updated: "
                    "make it give the same values on all ranks"
                )
        return (
            "No likely cause is in the step's graph: look for a hook, a callback or a session.run "
            "that changes variables on one rank"
        )


def _checksum(value: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
