"""The ranks, each evaluator and each data worker of a cluster, as groups of tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hostopt.cluster.tf_config import CHIEF, EVALUATOR, WORKER
from hostopt.launch import restarts
from hostopt.launch.engine import Place, Reservation
from hostopt.launch.restarts import RestartDecision, Slots, TaskExit
from hostopt.launch.task_group import FORWARDED, Group, preemption, task_exit
from hostopt.launch.task_process import TaskProcess

_LOG = logging.getLogger(__name__)


class Ring(Group):
    """The group of all ranks."""

    def __init__(self, *arguments: Any, slots: Slots) -> None:
        super().__init__(*arguments)
        self._slots = slots
        self._reservation: Reservation | None = None  # of the attempt

    def _find_places(self) -> Sequence[Place] | None:
        if self._reservation is None:
            least = min(self._slots.min_size, len(self._slots.in_use))
            reserved = self._engine.reserve(self._slots.in_use, least)
            self._reservation = self._attempt.enter_context(reserved)
            self._attempt.callback(setattr, self, "_reservation", None)
        return self._reservation.poll()

    def _start(self, places: Sequence[Place]) -> None:
        self._slots.use({place.slot: place.node for place in places})
        tasks = [(CHIEF, 0), *((WORKER, index) for index in range(len(places) - 1))]
        for job in (CHIEF, WORKER):
            self._cluster.pop(job, None)
        for (job, _), place in zip(tasks, places):
            self._cluster.setdefault(job, []).append(place.address)
        for task, place in zip(tasks, places):
            self._start_task(task, place, {"HOSTOPT_SLOT": str(place.slot)})

    def _exit_of(self, process: TaskProcess) -> TaskExit:
        rank = self._processes.index(process)
        slot = self._slots.in_use[rank]
        name = process.name if rank == slot else f"{process.name} (slot {slot})"
        return task_exit(process, name, slot)

    def _on_first_failure(self, first: TaskExit) -> None:
        if self._is_last_attempt:
            return
        # A preempted rank has made the others save a checkpoint.
        is_preempted = first.code - 128 in FORWARDED
        grace_period = preemption() if is_preempted else self._after_failure
        self._set_deadlines(grace_period)
        text = "%s failed first: %s; the other tasks have %g s to exit"
        _LOG.error(text, first.name, restarts.describe(first.code), grace_period[0][0])

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        attempts = self._restarts.max_restarts + 1
        attempt = self._restarts.used + (delay_s is None)
        text = f"attempt {attempt} of {attempts} failed; root cause: {decision.reason}"
        if delay_s is None:
            why = "giving up" if decision.retry else "a restart would fail the same way"
            _LOG.error("%s; %s", text, why)
            return
        if decision.cause:
            _LOG.error("%s", decision.cause)
        self._slots.choose(decision.failed_slots)
        _LOG.warning("%s; restarting in %g s%s", text, delay_s, self._slots.describe())


class _Companion(Group):
    """The group of one task beside the ranks, whose place outlives an attempt."""

    def __init__(
        self,
        *arguments: Any,
        task: tuple[str, int],
        reservation: Reservation,
        settings: Mapping[str, str],
    ) -> None:
        super().__init__(*arguments)
        self._task = task
        self._reservation = reservation
        self._settings = settings

    def _find_places(self) -> Sequence[Place] | None:
        are_ranks_placed = CHIEF in self._cluster  # their addresses are in TF_CONFIG
        return self._reservation.poll() if are_ranks_placed else None

    def _start(self, places: Sequence[Place]) -> None:
        self._start_task(self._task, places[self._task[1]], self._settings)


class Evaluator(_Companion):
    """The group of one evaluator."""

    def _start(self, places: Sequence[Place]) -> None:
        self._cluster[EVALUATOR] = [place.address for place in places]  # one may have moved
        super()._start(places)

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        then = "training continues without it"
        if delay_s is not None:
            then = f"restarting it in {delay_s:g} s"
        name, code = "{}:{}".format(*self._task), restarts.describe(decision.code)
        _LOG.error("%s failed: %s; %s", name, code, then)
        if decision.cause:
            _LOG.error("%s", decision.cause)


class DataWorker(_Companion):
    """The group of one data worker, which serves all attempts of the ring."""

    _is_over = False  # the ring has ended

    def forward(self, signum: int) -> None:
        """Allows no restart after a signal; the ranks may need data for their last step."""
        if self.code is None:
            self._signum = self._signum or signum
            self._end(())

    @property
    def is_lost(self) -> bool:
        """True if it has failed for good, and not by a signal to the launcher."""
        return bool(self.code) and self._signum is None

    def end(self) -> None:
        """Ends the task, as the ring has failed."""
        self._is_over = True
        self._end(())
        self.kill()  # it ignores SIGTERM, and has nothing to save

    def expect_end(self) -> None:
        """Gives the task the grace period to end by itself, as the ring has succeeded."""
        self._is_over = True
        self._end(())
        if self._running():
            self._set_deadlines(self._after_failure)

    def _finish_attempt(self) -> None:
        has_served = self._is_over or any(each.code for each in self._exits)
        super()._finish_attempt()
        if not has_served and self._signum is None:
            _LOG.warning(
                "%s:%d exited with code 0 before the ranks: it must call Estimator.train or "
                "estimator_ext.train_and_evaluate, which serve data until the ranks have ended",
                *self._task,
            )

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        if self._is_over:
            return
        then = "it is not restarted, and the ranks are ended, as they need its data"
        if delay_s is not None:
            then = (
                f"restarting it in {delay_s:g} s; elements that it had taken, and those in its "
                "shuffle buffers, are lost"
            )
        _LOG.error("%s; %s", decision.reason, then)
        if decision.cause:
            _LOG.error("%s", decision.cause)
