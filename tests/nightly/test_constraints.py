"""The pinned versions can be installed together on every Python that they are for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import uv
from harness import ROOT


@pytest.mark.parametrize(
    ("constraints", "tensorflow", "pythons"),
    [
        ("constraints.txt", "", ["3.9", "3.10", "3.11", "3.12", "3.13"]),
        ("constraints-2.15.txt", "tensorflow==2.15.*", ["3.9", "3.10", "3.11"]),
    ],
)
def test_the_constraints_resolve(
    tmp_path: Path, constraints: str, tensorflow: str, pythons: list[str]
) -> None:
    release = tmp_path / "release.txt"
    release.write_text(tensorflow)
    for python in pythons:
        run = subprocess.run(
            [
                *(uv.find_uv_bin(), "pip", "compile", "setup.cfg", str(release), "--all-extras"),
                *("--python-version", python, "--constraint", constraints),
            ],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, f"Python {python}: {run.stderr}"
        pinned = {line for line in (ROOT / constraints).read_text().split() if "==" in line}
        resolved = [line for line in run.stdout.splitlines() if line[:1].isalnum()]
        assert resolved
        assert [line for line in resolved if line.split()[0] not in pinned] == []
