"""Runs `make test` on every supported TensorFlow and Python; notes it in docs/compatibility.md.

    python tests/release/matrix.py [row ...]

A row is TensorFlow-Python, such as 2.16-3.11; all by default.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# the packages of the tests are not at hand: make brings them for each row
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
# each TensorFlow on the newest Python that it and its tf_keras work with, and on each Python its
# newest TensorFlow
ROWS = [
    "2.15-3.11",
    "2.16-3.11",
    "2.17-3.11",
    "2.18-3.11",
    "2.19-3.12",
    "2.20-3.13",
    "2.20-3.9",
    "2.21-3.10",
    "2.21-3.11",
    "2.21-3.12",
    "2.21-3.13",
]
# rows that are what `make test` chooses by itself on that Python
CHOSEN = ("2.20-3.9", "2.21-")
PACKAGES = ["tensorflow", "tf_keras", "numpy", "protobuf", "grpcio"]
RESULT = re.compile(r"^=+ .*\d+ (?:passed|failed|error).* in .*=+$", re.MULTILINE)
COUNT = re.compile(r"\d+ (?:passed|failed|skipped|errors?)")


def find_python(version: str) -> str | None:
    """Returns a Python of this version from PATH or pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}") or "", shutil.which("python3") or ""]
    candidates += map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):
        result = subprocess.run(
            [candidate, "-c", code], capture_output=True, text=True, check=False
        )
        if result.stdout.strip() == version:
            return candidate
    return None


def run(row: str, scratch: Path) -> str:
    """Runs one row.

    Returns:
      Its line of the table.
    """
    release, _, version = row.partition("-")
    python = find_python(version)
    if python is None:
        return f"| {release} | {version} | | | | | not run: no Python {version} at hand |"
    venv = scratch / row
    choice = [] if row.startswith(CHOSEN) else [f"TENSORFLOW={release}"]
    log = scratch / f"{row}.log"
    started_s = time.monotonic()
    with log.open("w") as output:
        command = ["make", f"PYTHON={python}", f"VENV={venv}", *choice, "test"]
        code = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=3600
        ).returncode
    minutes = (time.monotonic() - started_s) / 60
    text = log.read_text()
    counts = [", ".join(COUNT.findall(line)) for line in RESULT.findall(text)]
    print(f"{row}: exit {code}, {minutes:.1f} min, {counts}", flush=True)
    if code:
        print(text[-5000:], flush=True)
    query = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    result = subprocess.run(
        [str(venv / "bin" / "python"), "-c", query, *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    cells = dict(zip(PACKAGES, [*result, *[""] * len(PACKAGES)]))
    verdict = "; ".join(counts) if code == 0 else f"**failed** ({'; '.join(counts)})"
    shutil.rmtree(venv, ignore_errors=True)
    return (
        f"| {cells['tensorflow'] or release} | {version} | {cells['tf_keras']} | "
        f"{cells['numpy']} | {cells['protobuf']} | {cells['grpcio']} | {verdict} |"
    )


def lines_of(text: str) -> dict[str, str]:
    """Returns the current lines of the table, by row."""
    lines = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 2 and cells[1][:1].isdigit():
            lines[f"{'.'.join(cells[1].split('.')[:2])}-{cells[2]}"] = line
    return lines


def main() -> int:
    chosen = sys.argv[1:] or ROWS
    unknown = set(chosen) - set(ROWS)
    if unknown:
        print(f"unknown rows {sorted(unknown)}, wanted some of {ROWS}", file=sys.stderr)
        return 2
    ok = True
    with tempfile.TemporaryDirectory() as scratch:
        for row in chosen:
            line = run(row, Path(scratch))
            ok = ok and "not run" not in line and "failed" not in line
            text = PAGE.read_text()  # read anew: each row is noted as soon as it is known
            lines = {**lines_of(text), row: line}
            table = "\n".join(lines[name] for name in ROWS if name in lines)
            head, _, rest = text.partition("<!-- matrix -->\n")
            heading, _, after = rest.partition("<!-- end -->")
            titles = "\n".join(heading.splitlines()[:2])
            today = datetime.date.today().isoformat()
            head = re.sub(r"Last run: \S+", f"Last run: {today}.", head)
            PAGE.write_text(f"{head}<!-- matrix -->\n{titles}\n{table}\n<!-- end -->{after}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
