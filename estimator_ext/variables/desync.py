"""Replica consistency check: the ranks compare checksums of their variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from hostopt.tensorflow.checksums import check_same, checksums, has_numbers

# The ranks also compare after these steps of a training, as most causes act from the start.
_FIRST_STEPS = (1, 10, 100)


@dataclass(eq=False)
class DesyncCheckHook(tf.compat.v1.train.SessionRunHook):
    """Ends the training with an error if the bits of a variable differ between ranks.

    It must come before hooks that save. It also compares after the first, tenth and hundredth step
    of the training, and at its end. Collective: all ranks must have it, with the same steps.
    """

    communicator: hostopt.Communicator
    variables: Sequence[tf.Variable]
    every_steps: int
    steps_per_run: int
    suspects: Mapping[str, str]  # by variable, what may make it differ
    _first_step: int = 0
    _step: int = 0

    def __post_init__(self) -> None:
        self.variables = list(filter(has_numbers, self.variables))

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Stores the first step."""
        # counted by the hook: if global_step itself differs, the ranks still compare together
        self._step = int(session.run(tf.compat.v1.train.get_global_step()))
        self._first_step = self._step

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Compares the variables if the step is one of those to compare after."""
        before, self._step = self._step, self._step + self.steps_per_run
        firsts = (self._first_step + number for number in _FIRST_STEPS)
        is_early = any(before < step <= self._step for step in firsts)
        if is_early or self._step // self.every_steps != before // self.every_steps:
            self._compare(run_context.session)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Compares the variables that are about to be saved."""
        self._compare(session)

    def _compare(self, session: tf.compat.v1.Session) -> None:
        name = f"the checksums of the variables after step {self._step}"
        of_ranks = self.communicator.all_gather(checksums(session, self.variables), name)
        cluster, when = self.communicator.transport.cluster, f"after step {self._step}"
        check_same(of_ranks, self.variables, cluster, when, self._remedy, self._step)

    def _remedy(self, names: Sequence[str]) -> str:
        cause = (
            "The step's graph shows no likely cause: look for a hook, a callback or a session.run "
            "that changes variables on one rank"
        )
        name = next((name for name in names if name in self.suspects), None)
        if name is not None:
            cause = (
                f"The likely cause is {self.suspects[name]}, from which {name!r} is updated: "
                "make it compute the same values on all ranks"
            )
        return f"{cause}; then resume from a checkpoint of an earlier step"
