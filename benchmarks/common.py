"""What all benchmarks share: starting ranks, finding peers, tables, JSON and pictures."""

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
    """A program that was to be measured failed."""


# --- programs -------------------------------------------------------------------------------


def run(
    command: Sequence[object], timeout_s: float, environ: Mapping[str, str] | None = None
) -> str:
    """`run_together` of one program."""
    return run_together([(command, environ or {})], timeout_s)


def run_together(
    programs: Sequence[tuple[Sequence[object], Mapping[str, str]]], timeout_s: float
) -> str:
    """Run programs side by side, with what they start, and leave nothing of it behind.

    Args:
      programs: program and arguments of each, and its variables beside those of this process.
      timeout_s: seconds after which all are ended.

    Returns:
      What they printed, one after the other.

    Raises:
      BenchmarkError: one failed, or took too long; with the end of what it said.
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
    # those that were ended by us come last
    for program in sorted(failed, key=lambda program: program.code < 0):
        raise BenchmarkError(program.describe())
    return "".join(program.read() for program in started)


class _Program:
    """A program in a process group of its own; its output goes to a file, so it never blocks.

    Args:
      words: program and arguments.
      environ: variables beside those of this process.
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
        """End the process group, politely at first: launchers end their ranks on SIGTERM."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_TERM_S)
        self._signal(signal.SIGKILL)
        self.code = self.process.wait()

    def read(self) -> str:
        """What it has printed."""
        return _text(self._out)

    def describe(self) -> str:
        """How it failed, with its last words."""
        last = [*_text(self._out).splitlines()[-5:], *_text(self._err).splitlines()[-15:]]
        return "\n".join([f"{self.words}: exit code {self.code}", *last])

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def hostopt_run(np: int, *command: object) -> list[object]:
    """The command that starts `np` ranks on this machine."""
    return [sys.executable, "-m", "hostopt.cli", "run", "-np", np, "--", *command]


def mpirun(np: int, *command: object) -> list[object]:
    """The command that starts `np` ranks of OpenMPI on this machine."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *as_root, "--oversubscribe", "-np", np, *command]


def report(**result: Any) -> None:
    """Say a rank's result so that `results_in` finds it, whatever is printed around it."""
    sys.stdout.write(f"RESULT {json.dumps(result)} END\n")  # at once, as ranks may share a pipe
    sys.stdout.flush()


def results_in(text: str, count: int) -> list[dict[str, Any]]:
    """Find what `count` ranks reported.

    Args:
      text: output of the ranks.
      count: how many results there must be.

    Returns:
      The results.

    Raises:
      BenchmarkError: there are fewer or more.
    """
    found = re.findall(r"RESULT (\{.*?\}) END", text)
    if len(found) != count:
        raise BenchmarkError(f"wanted {count} results, got {len(found)}:\n{text[-2000:]}")
    try:
        return [json.loads(result) for result in found]
    except ValueError as error:
        raise BenchmarkError(f"a result is garbled: {error}\n{text[-2000:]}") from None


def horovod(operations: str, python: Path, *worker: object) -> tuple[list[object], dict[str, str]]:
    """Command and variables that start two ranks of Horovod on this machine.

    Args:
      operations: "gloo" or "mpi", which carry its collectives.
      python: interpreter of its environment.
      *worker: program and arguments of a rank.

    Returns:
      The command, and its variables beside those of this process.
    """
    environ = {"HOROVOD_CPU_OPERATIONS": operations.upper()}
    if operations == "gloo":
        horovodrun = [python, python.with_name("horovodrun"), "--gloo"]
        environ["HOROVOD_GLOO_IFACE"] = "lo"
        return [*horovodrun, "--network-interfaces", "lo", "-np", 2, *worker], environ
    # as Horovod's documentation says: its threads need more than one core each
    return mpirun(2, "-bind-to", "none", "-map-by", "slot", *worker), environ


@functools.cache  # says it once
def peer_python(name: str) -> Path | None:
    """Find a peer's virtual environment.

    Args:
      name: one of PEERS.

    Returns:
      Its Python; None, with a message, where the peer is not there.
    """
    python = PEERS_DIR / name / "bin/python"
    title, programs = PEERS[name]
    missing = [program for program in programs if shutil.which(program) is None]
    if not python.exists():
        missing.append(str(python))
    if missing:
        say(
            f"{title} is left out: no {', no '.join(missing)}. Install it with "
            "benchmarks/peers/install.sh, and name its directory in HOSTOPT_PEERS"
        )
        return None
    return python


def in_rounds(
    systems: Mapping[str, Callable[[], Any]], rounds: int, what: str = ""
) -> dict[str, list[Any]]:
    """Measure all systems in turn, again and again, so that a drift of the machine hits all.

    Args:
      systems: what measures each system once.
      rounds: how often.
      what: what is measured, for the messages.

    Returns:
      The results by system, one for each round that did not fail.
    """
    by_round = each_round(systems, rounds, what)
    found = {name: [done[name] for done in by_round if name in done] for name in systems}
    return {name: results for name, results in found.items() if results}


def each_round(
    systems: Mapping[str, Callable[[], Any]], rounds: int, what: str = ""
) -> list[dict[str, Any]]:
    """Measures all systems as `in_rounds` does, and keeps apart what belongs to each round.

    Args:
      systems: what measures each system once.
      rounds: how often.
      what: what is measured, for the messages.

    Returns:
      Results by system, for each round; a system that failed is missing from that round.
    """
    found: list[dict[str, Any]] = [{} for _ in range(rounds)]
    for number, done in enumerate(found, 1):
        for name, measure in systems.items():
            try:
                done[name] = measure()
            except BenchmarkError as error:
                say(f"{what} round {number}, {name} FAILED: {error}")
            else:
                say(f"{what} round {number}, {name}: done")
    return found


def say(text: str) -> None:
    """Tell the person at the terminal; tables alone go to standard output."""
    print(text.strip(), file=sys.stderr, flush=True)


# --- arguments and results ------------------------------------------------------------------


def parser(description: str | None, here: Path, rounds: int = 5) -> argparse.ArgumentParser:
    """Arguments that every benchmark takes; SIGTERM ends it as Ctrl-C does.

    Args:
      description: docstring of the benchmark.
      here: its folder.
      rounds: default number of rounds.

    Returns:
      A parser of --rounds, --json and --png.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    found.add_argument("--rounds", type=int, default=rounds, help="medians are over these")
    found.add_argument("--json", type=Path, default=here / "results.json", help="results")
    found.add_argument("--png", type=Path, default=here / "results.png", help="picture")
    return found


def machine(*pythons: Path | None) -> dict[str, Any]:
    """Facts about this machine and the programs on it.

    Args:
      *pythons: interpreters of peers, to ask for versions as well.

    Returns:
      Facts by name.
    """
    versions = _versions()
    for python in filter(None, pythons):
        code = f"import json; from benchmarks import common; print(json.dumps({_CALL}))"
        with contextlib.suppress(BenchmarkError):
            theirs = json.loads(run([python, "-c", code], 60.0))
            versions.update({k: v for k, v in theirs.items() if k not in versions})
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
    """Write results as JSON, print their tables, draw their picture.

    Args:
      results: what was measured.
      args: arguments that `parser` made.
      tables: makes Markdown of results that have been read from JSON.
      paint: draws such results on matplotlib Axes.
    """
    text = json.dumps(results, indent=1) + "\n"
    args.json.write_text(text)
    print(tables(json.loads(text)))
    draw(args.png, functools.partial(paint, json.loads(text)))


def median(values: Sequence[float]) -> float:
    """Median, of one value or more."""
    return statistics.median(values)


def ratio(value: float | None, of: float | None) -> str:
    """A cell with `value` / `of`; a dash where one of them is missing."""
    return "-" if value is None or of is None else f"{value / of:.2f}"


def in_each_round(
    rounds: Sequence[Mapping[str, float]],
    combine: Callable[[float, float], float],
    first: str,
    second: str,
) -> float | None:
    """Median of what two systems give together in each round, so that drift cancels out.

    Args:
      rounds: results of `each_round`.
      combine: makes one number of the results of both, such as their ratio.
      first: name of a system.
      second: name of another one.

    Returns:
      The median; None if no round has results of both.
    """
    both = [done for done in rounds if first in done and second in done]
    return median([combine(done[first], done[second]) for done in both]) if both else None


def middle(rounds: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Median of one system's results; None if no round has any."""
    results = [done[name] for done in rounds if name in done]
    return median(results) if results else None


def cell(value: float | None, digits: int) -> str:
    """A cell with a number; a dash if it is missing."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    Args:
      header: titles of the columns.
      rows: cells.

    Returns:
      Lines of text.
    """
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


_CALL = f"common.{_versions.__name__}()"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# --- pictures -------------------------------------------------------------------------------


def draw(path: Path, paint: Callable[[Any], None], size: tuple[float, float] = (8, 4.5)) -> None:
    """Draw a picture, where matplotlib is there.

    Args:
      path: the PNG file.
      paint: draws on the matplotlib Axes that it gets.
      size: width and height in inches.
    """
    try:
        import matplotlib
    except ImportError:
        say("no picture: matplotlib is not installed (pip install 'hostopt[draw]')")
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
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        painted = axes.bar(places, [value or 0.0 for value in values], width, label=name)
        labels = ["" if value is None else f"{value:.3g}" for value in values]
        axes.bar_label(painted, labels, fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.35)  # room for the legend
    axes.legend(fontsize=8, loc="upper center", ncols=3)
    axes.grid(axis="y", alpha=0.3)
