"""The progress of a run for its user, its summary, and the lines of its tasks that are shown."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from hostopt.cluster.tf_config import RING_JOBS
from hostopt.errors import ConfigError
from hostopt.launch import output
from hostopt.telemetry.progress import read_progress

_LIVE_S = 1.0  # between two states of the line on a terminal
_PLAIN_S = 30.0  # between two lines elsewhere
_SILENT_S = 30.0  # without a step, after which the line says so
_NOTABLE_INPUT = 0.3  # of a step
_COLUMN = 6  # characters of a column of the summary

Progress = dict[str, Any]


class Monitor:
    """Draws the live line of a run, and prints its summary.

    Without `log_dir`, the tasks' logs are written only if `verbose` is False, to a temporary
    directory that is removed if the run succeeds.
    """

    def __init__(self, directory: str, log_dir: str | None, verbose: bool) -> None:
        self._directory = directory
        self._verbose = verbose
        self._is_temporary = log_dir is None and not verbose
        self._log_dir = tempfile.mkdtemp(prefix="hostopt-logs-") if self._is_temporary else log_dir
        self._is_terminal = os.isatty(2) and os.environ.get("TERM") != "dumb"
        self._interval_s = _LIVE_S if self._is_terminal else _PLAIN_S
        self._begin_s = self._step_s = time.monotonic()
        self._next_s = self._begin_s + self._interval_s
        self._step = (0, 0)  # attempt and step of the last line
        self._filters: list[LineFilter] = []
        self.restarts = 0  # of the ranks
        if log_dir is not None:
            try:
                os.makedirs(log_dir, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the directory {log_dir!r} of logs cannot be made: {error}. Choose another "
                    "--log-dir"
                ) from error

    def progress_file(self, task: tuple[str, int], attempt: int) -> str:
        """Returns the path of the file to which a task writes its progress in an attempt."""
        if task[0] in RING_JOBS:
            self.restarts = attempt - 1
        return os.path.join(self._directory, "{:06}-{}-{}.json".format(attempt, *task))

    def log_file(self, task: tuple[str, int], attempt: int) -> str | None:
        """Returns the path of the log of a task in an attempt, without a file; None for none."""
        if self._log_dir is None:
            return None
        path = os.path.join(self._log_dir, "{}-{}.attempt-{}.log".format(*task, attempt))
        with contextlib.suppress(OSError):  # of an earlier run
            os.remove(path)
        return path

    def new_filter(self) -> Callable[[bytes], bool] | None:
        """Returns a function that decides which lines of a task are shown; None shows all."""
        if self._verbose:
            return None
        self._filters.append(LineFilter())
        return self._filters[-1].shows

    def next_time_s(self) -> float | None:
        """Returns the time, by `time.monotonic`, at which `advance` must be called again."""
        return None if self._verbose else self._next_s

    def advance(self) -> None:
        """Draws the line if it is due."""
        now_s = time.monotonic()
        if self._verbose or now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of another hostopt
            self._show(now_s)

    def _show(self, now_s: float) -> None:
        attempts, evaluation = self.read()
        if not attempts:
            return
        text = describe(self.restarts + 1, attempts, evaluation)
        training = attempts[max(attempts)]
        step = max(attempts), training["step"]
        if step != self._step:
            self._step, self._step_s = step, now_s
        elif now_s - self._step_s >= _SILENT_S:
            silence = _duration(now_s - self._step_s)
            is_ended = training.get("is_ended")  # an evaluator may still be at work
            begin = f"training ended {silence} ago" if is_ended else f"no step for {silence}"
            text = f"{begin}, {text}"
        if self._is_terminal:
            output.ERR.draw(text)
        else:
            output.ERR.write(f"hostopt: {text}\n".encode())

    def finish(self, code: int, reason: str = "") -> None:
        """Removes the line, and prints the summary of a training and where the logs are."""
        output.ERR.draw("")
        attempts, evaluation = self.read()
        lines = []
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of another hostopt
            if attempts:
                lines = summarize(attempts, evaluation, time.monotonic() - self._begin_s)
        if self._is_temporary and not code:
            shutil.rmtree(self._log_dir or "", ignore_errors=True)
        elif self._log_dir and (attempts or any(each.has_hidden for each in self._filters)):
            lines.append(("logs", self._log_dir))
        if attempts:
            text = f"{code}, root cause: {reason}" if reason else str(code)
            lines.append(("exit code", text))
        for name, text in lines:
            output.ERR.write(f"hostopt: {name + ':':<15}{text}\n".encode())

    def read(self) -> tuple[dict[int, Progress], Progress]:
        """Returns the progress of training by attempt, and of the newest evaluation."""
        attempts: dict[int, Progress] = {}
        evaluation: Progress = {}
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._directory)):
                if not name.endswith(".json"):
                    continue
                sections = read_progress(os.path.join(self._directory, name))
                if "training" in sections:
                    attempts[int(name[:6])] = sections["training"]
                other = sections.get("evaluation", {})
                if other.get("step", -1) > evaluation.get("step", -1):
                    evaluation = other
        return attempts, evaluation


def describe(attempt: int, attempts: Mapping[int, Progress], evaluation: Progress) -> str:
    """Returns the live line, what matters most first, as a narrow terminal shows its beginning.

    The chief has written `attempts`, by number from 1.
    """
    if attempt not in attempts:
        return f"attempt {attempt} starts"
    training = attempts[attempt]
    step, last = training["step"], training.get("last_step")
    parts = []
    if attempt > 1:
        parts.append(f"attempt {attempt}, resumed at {training['resumed_step']}")
    parts.append(f"step {step} of {last} ({100 * step // last} %)" if last else f"step {step}")
    rate = None if training.get("is_ended") else training.get("steps_per_s")
    if rate and last:
        parts.append(f"{_duration((last - step) / rate)} left")
    if rate:
        parts.append(f"{rate:.4g} steps/s{_examples(training, 'examples_per_s')}")
    if "loss" in training:
        parts.append(f"loss {training['loss']:.4g}")
    if evaluation:
        value, at = evaluation["value"], evaluation["step"]
        parts.append(f"{evaluation['metric']} {value:.4g} at {at}")
    if "checkpoint_step" in training:
        parts.append(f"saved at {training['checkpoint_step']}")
    if "communication_ms" in training:
        parts.append(f"communication {_communication(training)}")
    if "slowest_rank" in training:
        parts.append(f"slowest rank {training['slowest_rank']}")
    return ", ".join(parts)


def summarize(
    attempts: Mapping[int, Progress], evaluation: Progress, lasted_s: float
) -> list[tuple[str, str]]:
    """Returns names and texts of the lines of a summary."""
    training, first = attempts[max(attempts)], attempts[min(attempts)]
    loss = f", loss {training['loss']:.4g}" if "loss" in training else ""
    lines = [("steps", f"{first['first_step']} to {training['step']}{loss}")]
    resumed = f", attempt {max(attempts)} resumed at {training['resumed_step']}"
    lines.append(("time", f"{_duration(lasted_s)}{resumed if max(attempts) > 1 else ''}"))
    rate = training["mean_steps_per_s"]
    lines.append(("speed", f"{rate:.4g} steps/s{_examples(training, 'mean_examples_per_s')}"))
    if "communication_ms" in training:
        slowest = training.get("slowest_rank")
        rank = "" if slowest is None else f", slowest rank {slowest}"
        lines.append(("communication", f"{_communication(training)}{rank}"))
    if "times_ms" in training:
        lines += _table(training["times_ms"])
    if evaluation:
        metric, value, step = (evaluation[name] for name in ("metric", "value", "step"))
        text = f"{metric} {value:.4g} at step {step}"
        if evaluation["best_step"] != step:
            text += f"; best {evaluation['best']:.4g} at step {evaluation['best_step']}"
        lines.append(("evaluation", text))
    saved = f", saved at {training['checkpoint_step']}" if "checkpoint_step" in training else ""
    lines.append(("model_dir", f"{training['model_dir']}{saved}"))
    if "timeline" in training:
        lines.append(("timeline", training["timeline"]))
    return lines


def _examples(training: Progress, name: str) -> str:
    rate = training.get(name)
    return f", {rate:,.0f} examples/s" if rate else ""


def _communication(training: Progress) -> str:
    hidden = training["hidden_percent"]
    return f"{training['communication_ms']:.3g} ms, {hidden:.0f} % hidden"


def _table(times_ms: Mapping[str, float]) -> list[tuple[str, str]]:
    total_ms = sum(times_ms.values()) or 1.0
    names = [name.replace("_", " ") for name in times_ms]
    rows = [
        ("step time", names),
        ("in ms", [f"{ms:.3g}" for ms in times_ms.values()]),
        ("in %", [f"{100 * ms / total_ms:.0f}" for ms in times_ms.values()]),
    ]
    widths = [max(len(name), _COLUMN) for name in names]
    lines = [
        (title, "  ".join(cell.rjust(width) for cell, width in zip(cells, widths)))
        for title, cells in rows
    ]
    if times_ms.get("input", 0.0) > _NOTABLE_INPUT * total_ms:
        lines[-1] = (lines[-1][0], f"{lines[-1][1]}  input-bound")
    return lines


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


_MAX_WARNINGS = 1000  # that are remembered

_INFO = re.compile(
    rb"INFO:"  # Python's logging
    rb"|I\d{4} \d\d:\d\d:\d\d"  # absl
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I "  # TensorFlow's C++ code
)
# Messages that TensorFlow logs at every start, or when nothing is wrong.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called"
    rb"|(?:[EW]\d{4} |\d{4}-\d\d-\d\d ).*(?:failed call to cuInit|Unable to register cu"
    rb"|computation_placer already registered|Could not find TensorRT)"
    rb"|WARNING:tensorflow:From .* is deprecated and will be removed"
    rb"|WARNING:tensorflow:No new checkpoint ready for evaluation"
    rb"|Instructions for updating:"
    rb"|To enable the following instructions: "  # continues a message
    rb"|(?:W\d{4} |\d{4}-\d\d-\d\d ).*Local rendezvous is aborting with status: "
    rb"(?:ABORTED: Stopping remaining executors|OUT_OF_RANGE: End of sequence)"  # of the data
)
_INSTRUCTIONS = b"Instructions for updating:"
# Of an Estimator, which ends with a brace, or of a data worker, which ends with an empty line.
# Fields of protocol buffers follow, and the other attributes of the Estimator.
_CONFIGURATION = re.compile(rb" config: (?!\{.*\}$)")
_FIELD = re.compile(rb"\w+: \S+$|\w+ \{$|\}$|, '|$")
_LAST_FIELD = re.compile(rb", '|$")
_RECORD = re.compile(
    rb"(?:DEBUG|INFO|WARNING|ERROR|FATAL|CRITICAL):|Traceback |hostopt: |[IWEF]\d{4} "
    rb"|\d{4}-\d\d-\d\d |Fatal Python error|Aborted|terminate called"
)
_TRACEBACK = b"Traceback "


class LineFilter:
    """Shows errors, each warning once, and lines of no logger; hides informational messages.

    An indented line is hidden or shown with the line before. A configuration is hidden to its last
    field.
    """

    def __init__(self) -> None:
        self.has_hidden = False  # any line
        self._hides = False
        self._is_instruction = False
        self._is_configuration = False
        self._is_traceback = False
        self._warnings: set[int] = set()  # their hashes

    def shows(self, line: bytes) -> bool:
        """Returns True if a line is to be shown."""
        is_indented = line[:1] in (b" ", b"\t")
        if _RECORD.match(line):
            self._is_instruction = self._is_configuration = False
        is_field = self._is_configuration and (is_indented or bool(_FIELD.match(line)))
        hides = self._is_instruction or is_field
        if is_indented and not hides:
            hides = self._hides and not self._is_traceback  # of which another thread split lines
        elif not hides:
            hides = bool(_INFO.match(line) or _NOISE.match(line)) or self._is_repeated(line)
        if line.startswith(_TRACEBACK):
            self._is_traceback = True
        elif not (is_indented or hides):
            self._is_traceback = False
        self._is_instruction = line.startswith(_INSTRUCTIONS)
        if is_field:
            self._is_configuration = not _LAST_FIELD.match(line)
        else:
            self._is_configuration = hides and bool(_CONFIGURATION.search(line))
        self._hides = hides
        self.has_hidden = self.has_hidden or hides
        return not hides

    def _is_repeated(self, line: bytes) -> bool:
        if not line.startswith(b"WARNING:"):
            return False
        is_repeated = hash(line) in self._warnings
        if len(self._warnings) < _MAX_WARNINGS:
            self._warnings.add(hash(line))
        return is_repeated
