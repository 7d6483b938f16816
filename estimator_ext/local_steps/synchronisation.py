"""One synchronisation: the exchange of the ranks' states, and the reduction of the differences."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

import hostopt
from estimator_ext.local_steps.replica_part import Difference


class RankState(NamedTuple):
    """Progress of a rank since the last synchronisation, and its requests.

    Args:
      increment: increment of global_step in its steps; 0 while unknown.
      step_s: duration of its steps, in seconds; 0 if it has made none.
      saves: 1 if it is about to save.
      stops: 1 if it requests a stop.
      has_ended: 1 if its data or its training have ended.
      checksum: CRC-32 of its variables after the last synchronisation.
    """

    step: float
    increment: float
    step_s: float
    saves: float
    stops: float
    has_ended: float
    checksum: float


class Synchronisation:
    """Exchanges states and differences; the main thread and one in the background take turns."""

    def __init__(self, communicator: hostopt.Communicator) -> None:
        self._communicator = communicator
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hostopt-synchronisation")

    def exchange(
        self, state: RankState, examples: Sequence[float]
    ) -> tuple[list[RankState], list[list[float]]]:
        """Exchanges the states of the ranks. Collective: all ranks must call it.

        Args:
          state: the state of this rank.
          examples: number of its examples since the last synchronisation of each fragment.

        Returns:
          The states, and the examples of each fragment, each in the order of ranks.

        Raises:
          hostopt.CollectiveMismatchError: the variables of two ranks differed.
        """
        name = "the states of the ranks"
        local = np.array([*state, *examples], np.float64)
        rows = self._communicator.all_gather(local, name)
        states = [RankState(*row) for row in rows[:, : len(state)].tolist()]
        differing = [r for r, each in enumerate(states) if each.checksum != states[0].checksum]
        if differing:
            cluster = self._communicator.transport.cluster
            raise hostopt.CollectiveMismatchError(
                f"after the synchronisation before step {int(state.step)} the variables of "
                f"{cluster.describe(0)} and {', '.join(map(cluster.describe, differing))} "
                "differed, but all ranks should have had the same values. Look for a hook or a "
                "session.run that changes variables of one rank before the first step, or for "
                "faulty memory, and resume from an earlier checkpoint",
                **cluster.attributes(differing[0]),
                step=int(state.step),
            )
        return states, rows[:, len(state) :].T.tolist()

    def weight(self, examples: Sequence[float]) -> float:
        """Returns the weight of this rank.

        Args:
          examples: number of examples of each rank.
        """
        total = sum(examples)
        return examples[self._communicator.rank] / total if total else 1 / len(examples)

    def start(
        self, state: RankState, examples: float, differences: Sequence[Difference]
    ) -> Future[list[RankState]]:
        """Exchanges states and reduces differences in the background.

        Collective: all ranks must call it.

        Args:
          state: the state of this rank.
          examples: number of its examples since the last synchronisation of the fragment.
          differences: differences of this rank, which are replaced by their means.

        Returns:
          The states of all ranks, once the differences are reduced.
        """
        return self._executor.submit(self._run, state, examples, differences)

    def _run(
        self, state: RankState, examples: float, differences: Sequence[Difference]
    ) -> list[RankState]:
        states, (counts,) = self.exchange(state, [examples])
        weight = self.weight(counts)
        for difference in differences:
            difference.reduce(weight, is_whole=False)
        return states

    def close(self) -> None:
        """Ends the thread; does not wait for it."""
        self._executor.shutdown(wait=False)
