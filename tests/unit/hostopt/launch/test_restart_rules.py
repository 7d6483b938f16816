"""Random runs of the launcher, compared with a model of the rules in docs/recovery.md."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_launcher import FakeTask, World, silent
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

GRACE_S, KILL_S, PREEMPTION_S = 10.0, 5.0, 28.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DAMAGED = 76
REPORTERS = (DAMAGED, 200, 201, 202)  # exit codes of ranks that failed because of another one
CODES = [0, 1, 2, 65, 70, 74, 76, 79, 129, 130, 134, 137, 139, 143, 193, 200, 201, 202, 203, 255]


# --- the model --------------------------------------------------------------------------------


@dataclass
class Attempt:
    """Tasks that start together."""

    started_s: float
    tasks: list[FakeTask] = field(default_factory=list)
    ended: list[FakeTask] = field(default_factory=list)  # as the launcher sees them
    kill_at_s: float | None = None  # time of SIGKILL for those that still run
    term_at_s: float | None = None

    def failed(self) -> list[FakeTask]:
        """Tasks that failed, without those that the launcher ended."""
        return [task for task in self.ended if task.code and not task.forced]

    def cause(self) -> tuple[int, list[FakeTask]]:
        """Returns the exit code of the root cause, and the tasks that caused it."""
        failed = self.failed()
        for is_cause in (
            lambda code: code <= 128 and code != DAMAGED,
            lambda code: 128 < code <= 192,
            lambda code: code not in REPORTERS,
        ):
            causes = [task for task in failed if is_cause(task.code)]
            if causes:
                return causes[0].code or 0, causes
        late = [task for task in self.ended if task.forced]
        return (failed[0].code or 0, late) if failed else (0, [])


class Tasks:
    """Model of a group: the times at which tasks may start and must end."""

    def __init__(self, most: int, now_s: float) -> None:
        self.attempts: list[Attempt] = []
        self.code: int | None = None
        self.due_s: float | None = now_s
        self._restarts_left = most
        self._delay_s = 1.0
        self.forwarded: list[tuple[FakeTask, float, int]] = []  # by the launcher
        self._is_last = False  # no further attempt, however this one ends
        self._signum: int | None = None

    @property
    def current(self) -> Attempt:
        return self.attempts[-1]

    def running(self) -> list[FakeTask]:
        return [task for attempt in self.attempts for task in attempt.tasks if task.code is None]

    def begin(self, now_s: float) -> None:
        assert self.code is None
        assert self.due_s is not None and self.due_s <= now_s
        assert all(task.closed for attempt in self.attempts for task in attempt.tasks)
        self.due_s = None
        self.attempts.append(Attempt(now_s))

    def end(self, task: FakeTask, now_s: float) -> None:
        attempt = self.current
        if task.code and not any(earlier.code for earlier in attempt.ended):
            self._set_deadlines(task.code, now_s)
        attempt.ended.append(task)
        if len(attempt.ended) == len(attempt.tasks):
            self._decide(now_s)

    def _set_deadlines(self, code: int, now_s: float) -> None:
        if self._is_last or self.current.kill_at_s is not None:
            return
        if code - 128 in SIGNALS:  # preempted: the others save a checkpoint
            self.current.kill_at_s = now_s + PREEMPTION_S
        else:
            self.current.term_at_s = now_s + GRACE_S
            self.current.kill_at_s = now_s + GRACE_S + KILL_S

    def _decide(self, now_s: float) -> None:
        code, causes = self.current.cause()
        is_permanent = 0 < code <= 128 and code != DAMAGED
        if self._signum is not None and not is_permanent:
            self.code = 128 + self._signum
        elif code == 0 or is_permanent or self._is_last or not self._restarts_left:
            self.code = code
        else:
            self._restarts_left -= 1
            if now_s - self.current.started_s > 60:
                self._delay_s = 1.0
            assert 1 <= self._delay_s <= 60
            self.due_s = now_s + self._delay_s
            self._delay_s = min(60.0, 2 * self._delay_s)
            self.note_causes(causes)

    def note_causes(self, tasks: list[FakeTask]) -> None:
        """Called with the tasks that caused the failure, before the next attempt."""

    def signal(self, signum: int, now_s: float) -> None:
        if self.code is not None:
            return
        running = self.running()
        for task in running:
            self.forwarded.append((task, now_s, signum))
        if self._signum is None and not (running and any(t.code for t in self.current.ended)):
            self._signum = signum
        self._is_last = True
        if not running:
            self.due_s, self.code = None, 128 + self._signum
        elif signum != signal.SIGINT and self.current.kill_at_s is None:
            self.current.kill_at_s = now_s + PREEMPTION_S

    def kill(self, now_s: float) -> None:
        """Called for the second SIGINT."""
        if self.running():
            self.current.kill_at_s = now_s

    def stop(self, now_s: float) -> None:
        """Called for evaluators when the ranks have failed."""
        if self.code is not None or self._is_last:
            return
        self._is_last = True
        if not self.running():
            self.due_s, self.code = None, 0
        elif self.current.kill_at_s is None:
            self.current.term_at_s = now_s + GRACE_S
            self.current.kill_at_s = now_s + GRACE_S + KILL_S


class Ranks(Tasks):
    """Model of the ranks, with their slots."""

    def __init__(self, most: int, now_s: float, size: int, min_size: int) -> None:
        super().__init__(most, now_s)
        self.size, self.min_size = size, min_size
        self.slots = set(range(size))
        self._in_a_row = dict.fromkeys(range(size), 0)

    def note_causes(self, tasks: list[FakeTask]) -> None:
        failed = {int(task.environment["HOSTOPT_SLOT"]) for task in tasks}
        if failed == self.slots:  # then none of them counts
            failed = set()
        for slot in self.slots:
            self._in_a_row[slot] = self._in_a_row[slot] + 1 if slot in failed else 0
        failing = sorted(slot for slot in self.slots if self._in_a_row[slot] >= 2)
        self.slots = set(range(self.size)) - set(failing[: self.size - self.min_size])


# --- the machine ------------------------------------------------------------------------------


RUNS: dict[str, st.SearchStrategy[Any]] = {
    "sizes": st.tuples(*[st.integers(1, 4)] * 2),
    "more": st.integers(0, 2),
    "most": st.sampled_from([0, 1, 3, 10]),
}


class LauncherMachine(RuleBasedStateMachine):
    """Runs of the launcher, one after the other, with events at any time."""

    @initialize(**RUNS)
    def begin(self, sizes: tuple[int, int], more: int, most: int) -> None:
        size, min_size = max(sizes), min(sizes)
        self.interrupts = 0
        self.world = World(
            self._note_start,
            self._note_end,
            self._note_signal,
            self._note_wait,
            size=size,
            min_size=min_size,
            evaluators=more,
            max_restarts=most,
        )
        now_s = self.world.now_s
        self.most = most
        self.ranks = Ranks(most, now_s, size, min_size)
        self.evaluators = [Tasks(most, now_s) for _ in range(more)]
        self.code_of_evaluators = 0  # of the first evaluator that failed
        self.patch = pytest.MonkeyPatch()
        self.world.begin(self.patch)

    def _all(self) -> list[Tasks]:
        return [self.ranks, *self.evaluators]

    def _of(self, task: FakeTask) -> Tasks:
        job, index = task.task
        return self.evaluators[index] if job == "evaluator" else self.ranks

    def _note_start(self, task: FakeTask) -> None:
        tasks = self._of(task)
        if task.task[0] in ("chief", "evaluator"):
            tasks.begin(self.world.now_s)
        tasks.current.tasks.append(task)
        assert len(tasks.attempts) <= self.most + 1

    def _note_end(self, task: FakeTask) -> None:
        self._of(task).end(task, self.world.now_s)

    def _note_signal(self, signum: int) -> None:
        self.interrupts += signum == signal.SIGINT
        for tasks in self._all():
            if signum == signal.SIGINT and self.interrupts > 1:
                tasks.kill(self.world.now_s)
            else:
                tasks.signal(signum, self.world.now_s)

    def _note_wait(self) -> None:
        if self.ranks.code:
            for evaluator in self.evaluators:
                evaluator.stop(self.world.now_s)
        if not self.code_of_evaluators:
            codes = [evaluator.code for evaluator in self.evaluators if evaluator.code]
            self.code_of_evaluators = codes[0] if codes else 0

    @property
    def has_next(self) -> bool:
        return self.world.code is None

    @precondition(lambda self: self.has_next and self.world.running)
    @rule(which=st.integers(0, 5), code=st.sampled_from(CODES), seed=st.none() | st.integers(0, 9))
    def one_ends(self, which: int, code: int, seed: int | None) -> None:
        running = self.world.running
        running[which % len(running)].end(code)
        self._resume(seed)

    @precondition(lambda self: self.has_next and self.world.running)
    @rule(
        codes=st.just([0]) | st.lists(st.sampled_from(CODES), min_size=1, max_size=6),
        seed=st.integers(0, 9),
    )
    def all_ranks_end(self, codes: list[int], seed: int) -> None:
        ranks = [task for task in self.world.running if task.task[0] != "evaluator"]
        for number, task in enumerate(ranks):
            task.end(codes[number % len(codes)])
        self._resume(seed)

    @precondition(lambda self: self.has_next and len(self.ranks.running()) > 0)
    @rule(
        attempts=st.sampled_from([1, 2, 9]),
        lasted_s=st.sampled_from([0.0, 59.0, 61.0]),
        bad=st.dictionaries(st.integers(0, 3), st.sampled_from([137, 195, None]), max_size=3),
        report=st.sampled_from(REPORTERS),
        signum=st.sampled_from([None, None, None, *SIGNALS]),
        seed=st.integers(0, 9),
    )
    def attempts_fail(
        self,
        attempts: int,
        lasted_s: float,
        bad: dict[int, int | None],
        report: int,
        signum: signal.Signals | None,
        seed: int,
    ) -> None:
        """Bad slots fail or hang and the others report it, until the next attempt starts."""
        for _ in range(attempts):
            self._let_pass(lasted_s)
            if signum is not None and self.has_next:
                self.world.signal(signum)
                self._resume(seed)
            for task in self.ranks.running():
                code = bad.get(int(task.environment["HOSTOPT_SLOT"]), report)
                if task.exit_code is None and code is not None:
                    task.end(code)
            self._resume(seed)
            if self.ranks.running():
                self._let_pass(GRACE_S + KILL_S)
            if self.ranks.due_s is not None:
                self._let_pass(self.ranks.due_s - self.world.now_s)

    @precondition(lambda self: self.has_next)
    @rule(signum=st.sampled_from([*SIGNALS, None, None, None]), seed=st.none() | st.integers(0, 9))
    def the_launcher_receives(self, signum: signal.Signals | None, seed: int | None) -> None:
        if signum is not None:
            self.world.signal(signum)
        self._resume(seed)

    @precondition(lambda self: self.has_next)
    @rule(part=st.sampled_from([0.1, 0.5, 1.0, 1.0, 1.0]), late_s=st.sampled_from([0, 0, 0.1, 99]))
    def time_passes(self, part: float, late_s: float) -> None:
        if self.world.has_events:
            self._resume(0)
            return
        until_s = self.world.wait_until_s
        if until_s is None:
            self.world.now_s += 100 * part
            return
        self.world.now_s += part * (until_s - self.world.now_s)
        if part == 1:
            self.world.now_s = max(self.world.now_s, until_s) + late_s
            self.world.resume()

    @precondition(lambda self: not self.has_next)
    @rule(**RUNS)
    def another_run(self, sizes: tuple[int, int], more: int, most: int) -> None:
        self._leave()
        self.begin(sizes, more, most)

    def _let_pass(self, seconds: float) -> None:
        until_s = self.world.now_s + seconds
        while self.has_next:
            due_s = self.world.wait_until_s
            if not self.world.has_events:
                if due_s is None or due_s > until_s:
                    self.world.now_s = until_s
                    return
                self.world.now_s = max(self.world.now_s, due_s)
            self.world.resume()

    def _resume(self, seed: int | None) -> None:
        """Resumes the launcher, unless further events are to come at the same time."""
        if seed is not None and self.has_next:
            order = random.Random(seed)
            self.world.resume(lambda ready: order.sample(ready, len(ready)))

    # --- invariants --------------------------------------------------------------------

    @invariant()
    def no_task_is_forgotten(self) -> None:
        world = self.world
        if not self.has_next:
            return
        for tasks in self._all():
            if tasks.code is None:
                assert tasks.running() or tasks.due_s is not None
            if tasks.due_s is not None:
                assert world.wait_until_s is not None and world.wait_until_s <= tasks.due_s
            for task in tasks.running():
                forwarded = [(at_s, signum) for to, at_s, signum in tasks.forwarded if to is task]
                self._check_signals(task, tasks.current, forwarded)

    def _check_signals(
        self, task: FakeTask, attempt: Attempt, forwarded: list[tuple[float, int]]
    ) -> None:
        """A task receives forwarded signals, and SIGTERM and SIGKILL at its deadlines."""
        late = list(task.received)
        for signal_forwarded in forwarded:
            late.remove(signal_forwarded)
        for signum, due_s in (
            (signal.SIGTERM, attempt.term_at_s),
            (signal.SIGKILL, attempt.kill_at_s),
        ):
            sent = [at_s for at_s, result in late if result == signum]
            until_s = self.world.wait_until_s
            if sent:
                assert due_s is not None and due_s <= sent[0]
            elif due_s is not None and task.exit_code is None:
                assert until_s is not None and until_s <= due_s
        assert {signum for _, signum in late} <= {signal.SIGTERM, signal.SIGKILL}

    @invariant()
    def the_cluster_lists_each_rank(self) -> None:
        if not self.ranks.attempts or self.ranks.due_s is not None or self.ranks.code is not None:
            return
        tasks = self.ranks.current.tasks
        assert self.ranks.min_size <= len(tasks) <= self.ranks.size
        assert {int(task.environment["HOSTOPT_SLOT"]) for task in tasks} == self.ranks.slots
        configs = [json.loads(task.environment["TF_CONFIG"]) for task in tasks]
        addresses = [address for job in configs[0]["cluster"].values() for address in job]
        assert len(set(addresses)) == len(addresses) == len(tasks) + len(self.evaluators)
        assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
        names = [(config["task"]["type"], config["task"]["index"]) for config in configs]
        assert names == [task.task for task in tasks]
        assert names == [("chief", 0), *(("worker", i) for i in range(len(tasks) - 1))]

    @invariant()
    def the_run_ends_with_its_last_task(self) -> None:
        codes = [tasks.code for tasks in self._all()]
        assert self.has_next == (None in codes) or self.world.has_events
        if self.has_next:
            return
        expected = self.ranks.code or self.code_of_evaluators
        assert self.world.code == expected
        assert not self.world.running
        assert all(task.closed for task in self.world.tasks)

    def _leave(self) -> None:
        self.world.close()
        self.patch.undo()

    def teardown(self) -> None:
        """Checks that the run ends once its tasks have ended."""
        if not hasattr(self, "world"):
            return
        try:
            turns = 0
            while self.has_next and self.world.error is None:
                for task in self.world.running:
                    task.end(200)
                if not self.world.has_events:
                    assert self.world.wait_until_s is not None, (
                        "the launcher waits, but for no event"
                    )
                    self.world.now_s = max(self.world.now_s, self.world.wait_until_s)
                self.world.resume()
                turns += 1
                assert turns < 200
            self.the_run_ends_with_its_last_task()
        finally:
            self._leave()


def test_random_runs_follow_the_documented_rules() -> None:
    with silent():
        run_state_machine_as_test(
            LauncherMachine,
            settings=settings(stateful_step_count=40, report_multiple_bugs=False),
        )
