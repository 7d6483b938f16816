"""The pinned versions can be installed together on every Python that they are for."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

import pytest
import uv
from harness import ROOT

LOWEST = ROOT / "constraints-2.15.txt"


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


def test_tensorflow_2_15_runs_with_the_lowest_versions_of_all_others() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    needed = [config["options"]["install_requires"], *map(extras.get, ("metrics", "mpi", "ray"))]
    lowest = re.findall(r"^([\w-]+)[>=]=([\d.]+)", "\n".join(needed), re.MULTILINE)
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", LOWEST.read_text(), re.MULTILINE))
    assert {name for name, _ in lowest} > {"grpcio", "tensorflow", "zlib-ng", "mpi4py", "ray"}
    for name, version in lowest:
        found = pinned[name.replace("_", "-")]
        assert re.fullmatch(rf"{re.escape(version)}(\.0)*", found), f"{name}>={version}, {found}"
