"""Shared by all benchmarks: starting ranks, finding peers, tables, JSON and pictures."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
PEERS_DIR = Path(os.environ.get("HOSTOPT_PEERS") or ROOT / "benchmarks/peers/env")
PEERS = {
    "gloo": ("Gloo (PyTorch)", ()),
    "mpi": ("OpenMPI (mpi4py)", ("mpirun",)),
    "horovod": ("Horovod", ("mpirun",)),
}
# With as many ranks as cores, every system computes with the same threads.
SAME_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
_POLL_S = 0.05
_TERM_S = 10.0  # from SIGTERM to SIGKILL
_PACKAGES = ("tensorflow", "grpcio", "numpy", "torch", "mpi4py", "horovod")


class BenchmarkError(RuntimeError):
    """A measured program failed."""


# --- programs -------------------------------------------------------------------------------


def run(
    command: Sequence[object], timeout_s: float, environ: Mapping[str, str] | None = None
) -> str:
    """Runs one program; see `run_together`."""
    return run_together([(command, environ or {})], timeout_s)


def run_together(
    programs: Sequence[tuple[Sequence[object], Mapping[str, str]]], timeout_s: float
) -> str:
    """Runs programs side by side, and ends all processes that they have started.

    Args:
      programs: command of each program, and environment variables to add to the environment of
        this process.
      timeout_s: seconds after which all programs are ended.

    Returns:
      The output of the programs, concatenated.

    Raises:
      BenchmarkError: a program failed or took too long. The message has the end of its output.
    """
    started: list[_Program] = []
    try:
        for command, environ in programs:
            started.append(_Program([str(word) for word in command], environ))
        deadline_s = time.monotonic() + timeout_s
        while any(program.process.poll() is None for program in started):
            if any(program.process.poll() for program in started):
                break  # the others would wait for it
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"took longer than {timeout_s:g} s: {started[0].words}")
            time.sleep(_POLL_S)
    finally:
        for program in started:
            program.end()
    failed = [program for program in started if program.code]
    # programs that were ended here have a negative code and come last
    for program in sorted(failed, key=lambda program: program.code < 0):
        raise BenchmarkError(program.describe())
    return "".join(program.read() for program in started)


class _Program:
    """A program in a separate process group. Its output goes to a file, so it never blocks.

    Args:
      words: program and arguments.
      environ: environment variables added to the environment of this process.
    """

    def __init__(self, words: list[str], environ: Mapping[str, str]) -> None:
        self.words = " ".join(words)
        self.code = 0
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # closed with this object
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            words,
            env={**os.environ, **QUIET, **environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def end(self) -> None:
        """Ends the process group, first with SIGTERM, so that launchers end their ranks."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_TERM_S)
        self._signal(signal.SIGKILL)
        self.code = self.process.wait()

    def read(self) -> str:
        """Returns the standard output."""
        return _text(self._out)

    def describe(self) -> str:
        """Describes the failure, with the last lines of the output."""
        last_lines = [*_text(self._out).splitlines()[-5:], *_text(self._err).splitlines()[-15:]]
        return "\n".join([f"{self.words}: exit code {self.code}", *last_lines])

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def hostopt_run(np: int, *command: object, options: Sequence[object] = ()) -> list[object]:
    """Returns the command that starts `np` ranks on this machine.

    Args:
      np: number of ranks.
      *command: program and arguments of a rank.
      options: other arguments of `hostopt run`.
    """
    return [sys.executable, "-m", "hostopt", "run", "-np", np, *options, "--", *command]


def mpirun(np: int, *command: object) -> list[object]:
    """Returns the command that starts `np` ranks of OpenMPI on this machine."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *as_root, "--oversubscribe", "-np", np, *command]


@functools.cache  # log the message once
def has_mpi() -> bool:
    """Returns True if this Python and the `mpirun` of this machine can use MPI, else logs why."""
    missing = [] if shutil.which("mpirun") else ["mpirun"]
    try:
        importlib.metadata.version("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        missing.append("mpi4py")
    if missing:
        log(f"MPI is skipped: no {', no '.join(missing)}. Install them, as docs/mpi.md says")
    return not missing


def report(**result: Any) -> None:
    """Prints a rank's result so that `results_in` finds it among other output."""
    sys.stdout.write(
        f"RESULT {json.dumps(result)} END\n"
    )  # one write, because ranks may share a pipe
    sys.stdout.flush()


def results_in(text: str, count: int) -> list[dict[str, Any]]:
    """Parses the results that ranks have reported.

    Args:
      text: output of the ranks.
      count: expected number of results.

    Returns:
      The results.

    Raises:
      BenchmarkError: the number of results is different.
    """
    results = re.findall(r"RESULT (\{.*?\}) END", text)
    if len(results) != count:
        raise BenchmarkError(f"wanted {count} results, got {len(results)}:\n{text[-2000:]}")
    try:
        return [json.loads(result) for result in results]
    except ValueError as error:
        raise BenchmarkError(f"a result is garbled: {error}\n{text[-2000:]}") from None


def horovod(operations: str, python: Path, *worker: object) -> tuple[list[object], dict[str, str]]:
    """Returns the command and the variables that start two ranks of Horovod on this machine.

    Args:
      operations: "gloo" or "mpi", the library that runs its collectives.
      python: interpreter of its virtual environment.
      *worker: program and arguments of a rank.

    Returns:
      The command, and its environment variables added to the environment of this process.
    """
    environ = {"HOROVOD_CPU_OPERATIONS": operations.upper()}
    if operations == "gloo":
        horovodrun = [python, python.with_name("horovodrun"), "--gloo"]
        environ["HOROVOD_GLOO_IFACE"] = "lo"
        return [*horovodrun, "--network-interfaces", "lo", "-np", 2, *worker], environ
    # from Horovod's documentation: its threads need more than one core each
    return mpirun(2, "-bind-to", "none", "-map-by", "slot", *worker), environ


@functools.cache  # log the message once
def peer_python(name: str) -> Path | None:
    """Finds a peer's virtual environment.

    Args:
      name: one of PEERS.

    Returns:
      Its Python; None with a logged message if the peer is not installed.
    """
    python = PEERS_DIR / name / "bin/python"
    title, programs = PEERS[name]
    missing = [program for program in programs if shutil.which(program) is None]
    if not python.exists():
        missing.append(str(python))
    if missing:
        log(
            f"{title} is skipped: no {', no '.join(missing)}. Install it with "
            "benchmarks/peers/install.sh, and set HOSTOPT_PEERS to its directory"
        )
        return None
    return python


def in_rounds(
    systems: Mapping[str, Callable[[], Any]], rounds: int, description: str = ""
) -> dict[str, list[Any]]:
    """Measures all systems in turn in each round, so that drift of the machine affects all alike.

    Args:
      systems: function that measures the system once, by name.
      rounds: number of rounds.
      description: describes the measurement, for messages.

    Returns:
      Results by system, one for each round in which the system did not fail.
    """
    by_round = each_round(systems, rounds, description)
    by_system = {name: [done[name] for done in by_round if name in done] for name in systems}
    return {name: results for name, results in by_system.items() if results}


def each_round(
    systems: Mapping[str, Callable[[], Any]], rounds: int, description: str = ""
) -> list[dict[str, Any]]:
    """Measures all systems as `in_rounds` does, and returns the results of each round.

    Args:
      systems: function that measures the system once, by name.
      rounds: number of rounds.
      description: describes the measurement, for messages.

    Returns:
      Results by system, for each round. A system that failed is missing from that round.
    """
    results: list[dict[str, Any]] = [{} for _ in range(rounds)]
    for number, done in enumerate(results, 1):
        for name, measure in systems.items():
            try:
                done[name] = measure()
            except BenchmarkError as error:
                log(f"{description} round {number}, {name} FAILED: {error}")
            else:
                log(f"{description} round {number}, {name}: done")
    return results


def log(text: str) -> None:
    """Prints a message to standard error; only tables go to standard output."""
    print(text.strip(), file=sys.stderr, flush=True)


# --- arguments and results ------------------------------------------------------------------


def parser(description: str | None, here: Path, rounds: int = 5) -> argparse.ArgumentParser:
    """Creates the parser of the common arguments, and makes SIGTERM exit as Ctrl-C does.

    Args:
      description: docstring of the benchmark.
      here: folder of the benchmark.
      rounds: default number of rounds.

    Returns:
      A parser of --rounds, --json and --png.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    result.add_argument("--rounds", type=int, default=rounds, help="rounds; tables show medians")
    result.add_argument("--json", type=Path, default=here / "results.json", help="results")
    result.add_argument("--png", type=Path, default=here / "results.png", help="picture")
    return result


def machine(*pythons: Path | None) -> dict[str, Any]:
    """Describes this machine and the versions of the programs on it.

    Args:
      *pythons: interpreters of peers, whose versions are added.

    Returns:
      Attributes by name.
    """
    versions = _versions()
    for python in filter(None, pythons):
        code = f"import json; from benchmarks import common; print(json.dumps({_CALL}))"
        with contextlib.suppress(BenchmarkError):
            peer_versions = json.loads(run([python, "-c", code], 60.0))
            versions.update({k: v for k, v in peer_versions.items() if k not in versions})
    if pythons and shutil.which("mpirun"):
        with contextlib.suppress(BenchmarkError):
            versions["mpirun"] = run(["mpirun", "--version"], 60.0).splitlines()[0]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def publish(
    results: Mapping[str, Any],
    args: argparse.Namespace,
    tables: Callable[[Any], str],
    paint: Callable[[Any, Any], None],
) -> None:
    """Writes results as JSON, prints their tables, and draws their picture.

    Args:
      results: the results.
      args: parsed arguments of `parser`.
      tables: formats results that have been read from JSON as Markdown.
      paint: draws such results on matplotlib Axes.
    """
    text = json.dumps(results, indent=1) + "\n"
    args.json.write_text(text)
    print(tables(json.loads(text)))
    draw(args.png, functools.partial(paint, json.loads(text)))


def median(values: Sequence[float]) -> float:
    """Returns the median of one value or more."""
    return statistics.median(values)


def ratio(value: float | None, of: float | None) -> str:
    """Formats `value` / `of` as a table cell; a dash if one of them is missing."""
    return "-" if value is None or of is None else f"{value / of:.2f}"


def in_each_round(
    rounds: Sequence[Mapping[str, float]],
    combine: Callable[[float, float], float],
    first: str,
    second: str,
) -> float | None:
    """Returns the median over rounds of a function of two systems, so that drift cancels out.

    Args:
      rounds: results of `each_round`.
      combine: function of the two results of a round, such as their ratio.
      first: name of a system.
      second: name of another system.

    Returns:
      The median; None if no round has results of both.
    """
    both = [done for done in rounds if first in done and second in done]
    return median([combine(done[first], done[second]) for done in both]) if both else None


def middle(rounds: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Returns the median of one system's results; None if there are none."""
    results = [done[name] for done in rounds if name in done]
    return median(results) if results else None


def cell(value: float | None, digits: int) -> str:
    """Formats a number as a table cell; a dash if it is missing."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table.

    Args:
      header: titles of the columns.
      rows: cells of each row.

    Returns:
      Lines of text.
    """
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


_CALL = f"common.{_versions.__name__}()"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# --- pictures -------------------------------------------------------------------------------


def draw(path: Path, paint: Callable[[Any], None], size: tuple[float, float] = (8, 4.5)) -> None:
    """Draws a picture, if matplotlib is installed.

    Args:
      path: path of the PNG file.
      paint: draws on the given matplotlib Axes.
      size: width and height in inches.
    """
    try:
        import matplotlib
    except ImportError:
        log("no picture: matplotlib is not installed (pip install 'hostopt[draw]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    paint(axes)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Paint grouped bars with their values.

    Args:
      axes: matplotlib Axes.
      groups: names below the groups.
      series: values by name, one for each group; None leaves a bar out.
    """
    width = 0.8 / max(len(series), 1)
    for number, (name, values) in enumerate(series.items()):
        positions = [
            group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))
        ]
        painted = axes.bar(positions, [value or 0.0 for value in values], width, label=name)
        labels = ["" if value is None else f"{value:.3g}" for value in values]
        axes.bar_label(painted, labels, fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.35)  # room for the legend
    axes.legend(fontsize=8, loc="upper center", ncols=3)
    axes.grid(axis="y", alpha=0.3)
