"""The steps after which ranks that train by themselves synchronise, the same on all of them."""

from __future__ import annotations

import hostopt
from estimator_ext.session.coordinated_stop import EndStopSaveHook
from estimator_ext.strategy.local_steps import LocalSteps
from hostopt.tensorflow.ops import StopSaveFlags

_CHECK_S = 1.0  # between two exchanges of requests to stop


class SyncSchedule:
    """Counts the steps to the next synchronisation, and learns early of requests to stop.

    A rank whose data have ended counts on, without steps.

    Args:
      flags: `stop` is the request of this rank.
      stops: knows the step at which all ranks stop.

    Attributes:
      step: global_step of the ranks that have data, at the last synchronisation.
      position: number of steps since then; `is_due` counts them.
      is_whole_next: True if the next synchronisation is that of the whole model.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        options: LocalSteps,
        flags: StopSaveFlags,
        stops: EndStopSaveHook,
    ) -> None:
        self._options = options
        self._flags = flags
        self._stops = stops
        self._requests = communicator.open_scalar_sum("requests to stop")
        self._has_asked = False  # a sum of requests has started
        self._interval = 0  # steps between two synchronisations
        self._check_steps = 1  # between two exchanges of requests
        self._next_check = 1  # position
        self._size = communicator.size
        self.step = self.position = 0
        self.increment = 1  # of global_step in a step, the same on all ranks
        self.is_whole_next = False

    @property
    def has_begun(self) -> bool:
        """True after the first call of `begin`."""
        return self._interval > 0

    def begin(self, step: int, step_s: float, *, is_last: bool = False) -> None:
        """Begins the steps to the next synchronisation.

        Args:
          step: global_step of the ranks that have data.
          step_s: duration of a step on the slowest rank, in seconds; 0 if unknown.
          is_last: True if no steps follow.
        """
        interval, increment = self._options.interval(step, step_s), self.increment
        left = self._stops.steps_left(step)
        if left is not None and left <= interval * increment:
            interval = -(-left // increment)
            self.is_whole_next = True
        self._interval = 1 if is_last else max(interval, 1)
        self._check_steps = max(1, int(_CHECK_S / step_s)) if step_s else 1
        self.step, self.position, self._next_check = step, 0, self._check_steps

    def is_due(self, step_s: float) -> bool:
        """Returns True if a synchronisation follows a step on all ranks; call it once a step.

        Args:
          step_s: duration of a step of this rank, in seconds; 0 without steps.
        """
        if self.position >= self._interval:
            return True
        if self.position < self._next_check:
            return False
        if self.take_requests():
            return True
        self._requests.start(float(self._flags.stop), step_s)
        self._has_asked = True
        self._next_check = self.position + self._check_steps
        return False

    def take_requests(self) -> bool:
        """Waits for the last exchange; returns True if a rank had requested a stop before it."""
        if not self._has_asked:
            return False
        self._has_asked = False
        requests, total_s = map(float, self._requests.wait())
        is_requested = requests > 0
        self.is_whole_next |= is_requested
        step_s = total_s / self._size  # the same bits on all ranks
        self._check_steps = max(1, int(_CHECK_S / step_s)) if step_s else 2 * self._check_steps
        return is_requested

    def end_interval(self) -> int:
        """Returns global_step of the ranks that have data, at a synchronisation."""
        self.take_requests()
        return self.step + self.position * self.increment
