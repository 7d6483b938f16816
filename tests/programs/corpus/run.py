"""Runs the programs of the corpus, unmodified, alone and on two ranks; writes docs/programs.md.

    python tests/programs/corpus/run.py [--only NAME ...] [--json FILE]

The results are kept in a file for each TensorFlow; a run updates those of its programs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import QUIET, ROOT, deadline_s
from programs.corpus import published, sequences, stock
from programs.corpus.program import Program

PROGRAMS = {
    each.name: each for each in (*published.PROGRAMS, *stock.PROGRAMS, *sequences.PROGRAMS)
}
HERE = Path(__file__).resolve().parent
STEPS = 20
LIMIT_S = 600.0
REFUSED = 78
PAGE, README = ROOT / "docs" / "programs.md", ROOT / "README.md"
MOVED = 1e-3  # a variable that trains changes more than this, or by the tolerance many times


def measure(program: Program, scratch: Path) -> dict[str, Any]:
    """Runs a program alone and on two ranks.

    Returns:
      Its "alone" and "ranks" ("trained", "refused" or "failed"), the "words" that explain it,
      the "seconds" of both runs, and "models": for each, the number of "steps", whether the ranks
      hold "equal" bits, the largest relative "difference" between two ranks and one process, and
      the fraction of the variables that have "moved".
    """
    outcomes, seconds, words = [], [], ""
    for size in (1, 2):
        began_s = time.monotonic()
        code, output = _run(program, size, scratch)
        seconds.append(round(time.monotonic() - began_s, 1))
        is_clear = code == REFUSED and "Traceback" not in output
        outcomes.append("trained" if code == 0 else "refused" if is_clear else "failed")
        if code:
            (scratch / program.name / f"{size}.log").write_text(output)
            words = _last_error(output)
    result = dict(zip(("alone", "ranks"), outcomes), words=words, seconds=seconds, models={})
    if outcomes == ["trained", "trained"]:
        result["models"] = {
            model: _compare(program, model, scratch / program.name) for model in program.models
        }
    return result


def unexpected(program: Program, result: dict[str, Any]) -> str:
    """Returns what differs from the expectations, or an empty string."""
    if program.refused:
        is_right = result["ranks"] == "refused" and program.refused in result["words"]
        return "" if is_right else f"{result['ranks']} on two ranks: {result['words']}"
    if (result["alone"], result["ranks"]) != ("trained", "trained"):
        return f"{result['alone']} alone, {result['ranks']} on two ranks: {result['words']}"
    for model, found in result["models"].items():
        if not found["equal"]:
            return f"{model}: the ranks hold different variables"
        if len(set(found["steps"])) > 1:
            return f"{model}: trained for {found['steps']} steps"
        if program.not_compared:
            continue
        if found["difference"] > program.tolerance or found["moved"] <= 0.5:
            return f"{model}: {found}"
    return ""


def _run(program: Program, size: int, scratch: Path) -> tuple[int, str]:
    """Runs it on that many ranks; returns its exit code and the output of all ranks."""
    directory, data = scratch / program.name / str(size), scratch / "data"
    directory.mkdir(parents=True)
    values = {
        "model_dir": directory / "model",
        "batch_size": program.batch_size // (1 if program.is_global else size),
        "steps": STEPS,
        "epochs": 1 / size,
        "data": data,
        "directory": directory,
        "examples": ROOT / "examples",
        "here": HERE,
    }
    environ = {**os.environ, **QUIET, "RECORD_TO": str(directory)}
    environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # its kernels may round by the size of a batch
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(path)
    for command in program.prepare:
        done = scratch / f"{abs(hash(command))}.done"
        if not done.exists():
            code, output = _execute(command.format(**values).split(), directory, environ)
            if code:
                return code, output
            done.touch()
    if size > 1:
        first = scratch / program.name / "1"
        for pattern in program.prepared:
            _copy(first, directory, pattern)
        if not (program.not_compared or program.starts_alike):
            _copy_first_checkpoints(first, directory)
    words = program.command.format(**values).split()
    if words[0].endswith(".py"):
        words[0] = str(HERE / words[0])
    command = ["-m", "estimator_ext", *program.options.split(), str(HERE / "recorded.py"), *words]
    if size > 1 or program.in_cluster:
        launcher = ["-m", "hostopt", "run", "-np", str(size), "--verbose", "--", sys.executable]
        command = [*launcher, *command]
    return _execute(command, directory, environ)


def _copy_first_checkpoints(source: Path, target: Path) -> None:
    """Makes trainings start with the initial values of earlier ones, also if names differ."""
    for directory in _copy(source, target, "model.ckpt-0.*"):
        (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')


def _copy(source: Path, target: Path, pattern: str) -> set[Path]:
    """Copies the files of a pattern; returns the directories that they are in now."""
    directories = set()
    for path in source.rglob(pattern):
        directory = target / path.parent.relative_to(source)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, directory)
        directories.add(directory)
    return directories


def _execute(
    arguments: Sequence[str], directory: Path, environ: dict[str, str]
) -> tuple[int, str]:
    """Runs Python; after the deadline it kills all that it has started."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=deadline_s(LIMIT_S))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[0]}\nError: it does not end"
    return process.returncode, output


def _last_error(output: str) -> str:
    """Returns the line that says why a program ended: a message of the runner, or an error."""
    lines = [re.sub(r"^\[[\w:]+\] ", "", line) for line in output.splitlines()]
    ours = [line for line in lines if re.match(r"(hostopt|estimator_ext)\b.*: ", line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    chosen = ours if ours and "Traceback (" not in output else errors or lines[-1:]
    return chosen[-1 if chosen is errors else 0] if chosen else ""


# --- variables --------------------------------------------------------------------------------


def _compare(program: Program, model: str, directory: Path) -> dict[str, Any]:
    """Compares the variables of two ranks with one another and with those of one process."""
    initial = _recorded(directory / "1", model, "initial", 0)
    alone = _recorded(directory / "1", model, "final", 0)
    first, second = (_recorded(directory / "2", model, "final", rank) for rank in (0, 1))
    steps = [int(values.pop("step", -1)) for values in (alone, first, second)]
    is_equal = set(first) == set(second) and all(
        np.array_equal(value, second[name], equal_nan=True) for name, value in first.items()
    )
    result = {"steps": steps, "equal": bool(first) and is_equal}
    if program.not_compared:
        return result
    differences, moves = [], []
    for name in set(alone) | set(first):
        pair = alone.get(name, np.nan), first.get(name, np.nan)
        if program.noise and re.search(program.noise, name):
            differences.append(0.0 if np.abs(pair).max() < MOVED else np.inf)
            continue
        difference = np.abs(pair[1] - pair[0]) / (1 + np.abs(pair[0]))
        differences.append(np.nan_to_num(difference, nan=np.inf).max())
        moves.append(np.abs(pair[0] - initial[name]).max() > 10 * program.tolerance)
    result["difference"] = float(max(differences, default=np.inf))
    result["moved"] = round(float(np.mean(moves)), 2) if moves else 0.0
    return result


def _recorded(directory: Path, model: str, when: str, rank: int) -> dict[str, Any]:
    """Reads the variables of a rank, of one model or of all if it has no name."""
    return {
        name if name == "step" or model else f"{path.name.partition('.')[0]}: {name}": value
        for path in sorted(directory.glob(f"{model or '*'}.{when}-{rank}.npz"))
        for name, value in np.load(path).items()
    }


# --- results ----------------------------------------------------------------------------------


def counts(results: dict[str, Any]) -> str:
    """Returns how many programs train, as a sentence."""
    found = dict.fromkeys(("trained", "refused", "failed", "silent"), 0)
    known = _known(results)
    for program, result in known:
        is_silent = unexpected(program, result) and result["ranks"] == "trained"
        found["silent" if is_silent else result["ranks"]] += len(program.models)
    sources = len({program.source for program, _ in known})
    return (
        f"{sum(found.values())} programs of {sources} sources: {found['trained']} train on two "
        f"ranks, {found['refused']} are refused, {found['failed']} fail, {found['silent']} are "
        "silently wrong"
    )


def table(results: dict[str, Any]) -> str:
    """Returns a table of all results, in Markdown."""
    titles = "| program | source | licence | alone | 2 ranks | difference after 20 steps |"
    rows = [_row(*each, unexpected(*each)) for each in _known(results)]
    return "\n".join([titles, "|---|---|---|---|---|---|", *rows])


def _known(results: dict[str, Any]) -> list[tuple[Program, dict[str, Any]]]:
    found = results["programs"]
    return [(program, found[name]) for name, program in PROGRAMS.items() if name in found]


def _message(words: str) -> str:
    """Returns a message without the rank, the paths and the state of one run."""
    words = re.sub(r"^hostopt: (rank \d+ \(.*?\): \w+: )?", "", words)
    words = re.sub(r"(chief|worker):\d+, [\d.:]+ ", "", words)
    return re.sub(r" (Newest intact checkpoint|\[traceback).*", "", words)


def _row(program: Program, result: dict[str, Any], wrong: str) -> str:
    count = len(program.models)
    name = f"{program.name}, {count} models" if count > 1 else program.name
    if result["ranks"] != "trained":
        seen = f'"{_message(result["words"])}"'
    elif wrong:
        seen = f"**{wrong}**"
    elif program.not_compared:
        seen = f"not compared: {program.not_compared}"
    else:
        seen = f"{max(each['difference'] for each in result['models'].values()):.0e}"
    if program.options:
        seen += f"; with `{program.options}`"
    cells = [name, program.source, program.licence, result["alone"], result["ranks"], seen]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Writes one line for each program of the corpus."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(results['programs'][name])}"
        for name in PROGRAMS
        if name in results["programs"]
    ]
    head = {name: results[name] for name in ("tensorflow", "date")}
    programs = ",\n".join(lines)
    path.write_text(f'{json.dumps(head)[:-1]}, "programs": {{\n{programs}\n}}}}\n')


def write_page() -> None:
    """Writes the newest table and all counts into docs/programs.md, and counts into README."""
    results = [json.loads(path.read_text()) for path in sorted(HERE.glob("results-*.json"))]
    newest = f"{counts(results[-1])}."
    heads = [
        f"TensorFlow {each['tensorflow']}, {each['date']}: {counts(each)}." for each in results
    ]
    parts = (
        (PAGE, "corpus", [*heads, table(results[-1])]),
        (PAGE, "counts", [newest]),
        (README, "counts", [newest]),
    )
    for page, name, paragraphs in parts:
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        between = re.compile(f"{begin}.*?{end}", re.DOTALL)
        wrapped = [each if each[0] == "|" else textwrap.fill(each, 99) for each in paragraphs]
        made = "\n".join([begin, "\n\n".join(wrapped), end])
        page.write_text(between.sub(lambda _, made=made: made, page.read_text()))


def main() -> int:
    version = importlib.metadata.version("tensorflow")
    release = version.rpartition(".")[0]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--json", type=Path, default=HERE / f"results-{release}.json")
    args = parser.parse_args()
    surprises = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only:
            result = measure(PROGRAMS[name], Path(scratch))
            wrong = unexpected(PROGRAMS[name], result)
            surprises += bool(wrong)
            print(f"{name}: {result['seconds']} s, {wrong or result['ranks']}", flush=True)
            # read anew: another run may have updated it
            results = json.loads(args.json.read_text()) if args.json.exists() else {}
            results["programs"] = {**results.get("programs", {}), name: result}
            results.update(tensorflow=version, date=datetime.date.today().isoformat())
            write_results(args.json, results)
    if args.json.parent == HERE:
        write_page()
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
