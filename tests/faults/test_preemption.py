"""SIGTERM and SIGINT: all ranks stop after the same step, and one checkpoint is saved."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tensorflow as tf
from harness import PROGRAMS, QUIET, Process, reserved_addresses
from one_weight import model_fn
from ranks import Rank, Ranks
from signalled import LATE, saved_steps, settings, start

import estimator_ext
from estimator_ext.session.preemption import PreemptionHook

estimator_ext.install()


def interrupt(stuck: Rank) -> None:
    """Sends SIGINT to a rank that is stuck in user code, and waits until it is seen."""
    stuck.wait_for_output("user code sleeps now")
    stuck.signal(signal.SIGINT)
    stuck.wait_for_output("got SIGINT: training stops on all ranks")


# -- one rank, in this process -------------------------------------------------------------


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat()


class SignalAt(tf.compat.v1.train.SessionRunHook):
    """Sends signals to this process in a step, and optionally requests a stop."""

    def __init__(self, step: int, signum: int, stops: bool = False, times: int = 1) -> None:
        self._step, self._signum, self._stops, self._times = step, signum, stops, times

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._step -= 1
        if self._step == 0:
            for _ in range(self._times):
                signal.raise_signal(self._signum)
            if self._stops:
                run_context.request_stop()


def train_alone(tmp_path: Path, hook: Any, max_steps: int = 6, **chosen: Any) -> None:
    strategy = estimator_ext.HostOffloadStrategy()
    config = estimator_ext.RunConfig(train_distribute=strategy, **chosen)
    estimator = estimator_ext.Estimator(model_fn, str(tmp_path / "model" / "adam"), config)
    with contextlib.closing(strategy):
        estimator.train(data, hooks=[hook], max_steps=max_steps)


@pytest.fixture
def handlers() -> Iterator[dict[int, Any]]:
    """Installs the default handlers, and checks that the test restores them."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {signum: signal.signal(signum, handler) for signum, handler in usual.items()}
    wakeup_fd = signal.set_wakeup_fd(-1)
    yield usual
    result = {signum: signal.signal(signum, handler) for signum, handler in before.items()}
    assert result == usual
    assert signal.set_wakeup_fd(wakeup_fd) == -1


@pytest.mark.parametrize(
    ("signum", "step", "stops"),
    [
        (signal.SIGTERM, 3, False),
        (signal.SIGINT, 3, False),
        (signal.SIGTERM, 3, True),
        (signal.SIGTERM, 6, False),  # the last step
    ],
)
def test_a_signal_saves_a_checkpoint_and_ends_one_rank(
    tmp_path: Path, handlers: dict[int, Any], signum: int, step: int, stops: bool
) -> None:
    expected = KeyboardInterrupt if signum == signal.SIGINT else SystemExit
    with pytest.raises(expected) as caught:
        train_alone(tmp_path, SignalAt(step, signum, stops))
    assert expected is KeyboardInterrupt or caught.value.code == 143
    assert saved_steps(tmp_path) == [0, step]
    train_alone(tmp_path, SignalAt(LATE, signum))
    assert saved_steps(tmp_path)[-1] == 6


def test_further_sigterms_change_nothing(tmp_path: Path, handlers: dict[int, Any]) -> None:
    with pytest.raises(SystemExit) as caught:
        train_alone(tmp_path, SignalAt(3, signal.SIGTERM, times=3))
    assert caught.value.code == 143
    assert saved_steps(tmp_path) == [0, 3]


def test_further_sigterms_do_not_interrupt_the_exit_before_the_first_step(
    handlers: dict[int, Any],
) -> None:
    left = []
    with pytest.raises(SystemExit), PreemptionHook(lambda: None).handled():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            left.append("exited")
    assert left


def test_a_second_ctrl_c_ends_the_training_but_not_the_process(
    tmp_path: Path, handlers: dict[int, Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_alone(tmp_path, SignalAt(3, signal.SIGINT, times=2))
    assert saved_steps(tmp_path) == [0]
    train_alone(tmp_path, SignalAt(LATE, signal.SIGINT))
    assert saved_steps(tmp_path) == [0, 6]


def test_signals_are_handled_in_a_process_with_many_open_files(
    handlers: dict[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tf.get_logger().propagate = True
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        with pytest.raises(SystemExit), PreemptionHook(lambda: None).handled():
            signal.raise_signal(signal.SIGTERM)
    assert "got SIGTERM" in caplog.text


def test_a_signal_without_a_saver_logs_that_nothing_is_saved(
    tmp_path: Path, handlers: dict[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tf.get_logger().propagate = True
    hook = SignalAt(3, signal.SIGTERM)
    with pytest.raises(SystemExit):
        train_alone(tmp_path, hook, save_checkpoints_steps=None, save_checkpoints_secs=None)
    assert "nothing is saved, as no saver is configured" in caplog.text
    assert "with a checkpoint" not in caplog.text
    assert saved_steps(tmp_path) == []


class ForkAt(tf.compat.v1.train.SessionRunHook):
    """Forks a child in a step and ends it with a signal."""

    def __init__(self, signum: int) -> None:
        self._signum, self.status = signum, None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.status is None:
            pid = os.fork()
            if pid == 0:
                signal.raise_signal(self._signum)
                os._exit(0)
            self.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_sigterm_kills_a_forked_child_and_training_continues(
    tmp_path: Path, handlers: dict[int, Any]
) -> None:
    fork = ForkAt(signal.SIGTERM)
    train_alone(tmp_path, fork)
    assert fork.status == -signal.SIGTERM
    assert saved_steps(tmp_path) == [0, 6]


def test_a_signal_handler_of_the_program_is_kept(tmp_path: Path, handlers: dict[int, Any]) -> None:
    got = []
    handlers[signal.SIGTERM] = own = lambda signum, _: got.append(signum)
    signal.signal(signal.SIGTERM, own)
    train_alone(tmp_path, SignalAt(3, signal.SIGTERM))
    assert got == [signal.SIGTERM]
    assert saved_steps(tmp_path) == [0, 6]


# -- processes -----------------------------------------------------------------------------


def test_a_stuck_rank_ends_after_the_grace_period(tmp_path: Path, ranks: Ranks) -> None:
    fault = {"point": "input", "step": 4, "action": "sleep"}
    with reserved_addresses(2) as addresses:
        chief, stuck = start(ranks, tmp_path, addresses, fault, grace_s=1.0)
        stuck.wait_for_output("user code sleeps now")
        stuck.signal(signal.SIGTERM)
        assert stuck.wait(20) == 143, stuck.output
        assert chief.wait(20) == 200, chief.output
    assert "the time to end is over: this process ends at once" in stuck.output
    assert saved_steps(tmp_path) == [0]


def test_a_third_ctrl_c_ends_a_stuck_rank_at_once(tmp_path: Path, ranks: Ranks) -> None:
    fault = {"point": "input", "step": 4, "action": "sleep"}
    with reserved_addresses(2) as addresses:
        chief, stuck = start(ranks, tmp_path, addresses, fault, interrupted_again_s=1000.0)
        interrupt(stuck)
        stuck.signal(signal.SIGTERM)
        stuck.signal(signal.SIGINT)
        stuck.wait_for_output("got SIGINT again: this training ends at once")
        assert stuck.process.poll() is None
        stuck.signal(signal.SIGINT)
        assert stuck.wait(20) == 130, stuck.output
        assert chief.wait(20) == 200, chief.output
    assert "got SIGINT a third time: this process ends at once" in stuck.output


def test_a_stuck_rank_ends_some_time_after_a_second_ctrl_c(tmp_path: Path, ranks: Ranks) -> None:
    fault = {"point": "input", "step": 4, "action": "sleep"}
    times = {"grace_s": 0.0, "interrupted_again_s": 0.1}  # the first SIGINT starts neither
    with reserved_addresses(2) as addresses:
        _, stuck = start(ranks, tmp_path, addresses, fault, **times)
        interrupt(stuck)
        stuck.signal(signal.SIGINT)
        assert stuck.wait(20) == 130, stuck.output
    assert "got SIGINT again" in stuck.output
    assert "the time to end is over: this process ends at once" in stuck.output


def test_a_rank_that_is_stuck_in_its_cleanup_ends_after_the_grace_period(
    tmp_path: Path, ranks: Ranks
) -> None:
    fault = {"point": "cleanup", "step": 4, "action": "sleep"}
    times = {"grace_s": 1.0, "interrupted_again_s": 0.1}
    with reserved_addresses(2) as addresses:
        _, stuck = start(ranks, tmp_path, addresses, fault, **times)
        interrupt(stuck)
        stuck.signal(signal.SIGINT)
        stuck.wait_for_output("cleanup begins")
        assert stuck.wait(20) == 130, stuck.output
    assert "the time to end is over: this process ends at once" in stuck.output


def test_a_signal_before_the_first_step_ends_a_rank_at_once(tmp_path: Path, ranks: Ranks) -> None:
    with reserved_addresses(2) as addresses:
        (chief,) = ranks.start(
            "train_with_fault.py",
            {"worker": addresses},
            tasks=[("worker", 0)],  # the other rank never starts
            arguments=settings(tmp_path),
            environ={"HOSTOPT_RENDEZVOUS_TIMEOUT_S": "100"},
        )
        chief.wait_for_output("missing")
        chief.signal(signal.SIGTERM)
        assert chief.wait(20) == 143, chief.output
    assert "got SIGTERM: this process ends before its first step" in chief.output


def launch(directory: Path, fault: dict[str, Any]) -> Process:
    """Starts `hostopt run` with two ranks, both with a fault."""
    program = str(PROGRAMS / "train_with_fault.py")
    command = [sys.executable, "-m", "hostopt", "run", "-np", "2", "--verbose", program]
    return Process(
        [*command, *settings(directory, steps=LATE, fault=fault)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**QUIET, **os.environ},
    )


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_to_the_launcher_stops_all_ranks_with_a_checkpoint(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    fault = {"point": "before-reduce", "step": 3, "action": "say"}
    run = launch(tmp_path, fault)
    lines = []
    for line in run.stdout or ():
        lines.append(line)
        if "[chief:0] now" in line:
            run.send_signal(signum)
    output = "".join(lines)
    assert run.wait() == code, output
    first, last = saved_steps(tmp_path)
    assert first == 0
    assert last >= 4
    assert output.count(f"Saving checkpoints for {last}") == 1


def test_sigterm_to_every_process_of_a_run_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    """Service managers do this; ranks also receive it from their supervisors and the launcher."""
    run = launch(tmp_path, {"point": "before-reduce", "step": 3, "action": "say"})
    lines = []
    for line in run.stdout or ():
        lines.append(line)
        if "[chief:0] now" in line:
            launcher = psutil.Process(run.pid)
            for process in (launcher, *launcher.children(recursive=True)):
                process.terminate()
    output = "".join(lines)
    assert run.wait() == 143, output
    first, last = saved_steps(tmp_path)
    assert (first, last >= 4) == (0, True)
    assert output.count(f"Saving checkpoints for {last}") == 1


def test_a_second_ctrl_c_ends_stuck_ranks(tmp_path: Path) -> None:
    run = launch(tmp_path, {"point": "input", "step": 4, "action": "sleep"})
    lines = []
    for line in run.stdout or ():
        lines.append(line)
        is_stuck = line == "[chief:0] user code sleeps now\n"
        if is_stuck or "got SIGINT: training stops on all ranks" in line:
            run.send_signal(signal.SIGINT)
    output = "".join(lines)
    assert run.wait() == 130, output
    assert "interrupted again: killing all tasks" in output
    assert saved_steps(tmp_path) == [0]
