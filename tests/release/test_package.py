"""The package of the last commit: what it contains, and what it does on a machine without it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import uv
from harness import QUIET, ROOT, deadline_s
from legacy_sets import SAVED_BY
from release.matrix import find_python

from hostopt.versions import VERSION

UV = uv.find_uv_bin()
PYTHONS = ["3.9", "3.11", "3.13"]
WHEEL, SOURCE = f"hostopt-{VERSION}-py3-none-any.whl", f"hostopt-{VERSION}.tar.gz"
METADATA = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"]
EGG_INFO = ["PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt"]
EGG_INFO += ["top_level.txt"]

pytestmark = pytest.mark.timeout(0)  # environments are downloaded, and each command has a deadline


def run(*command: str | Path, **options: object) -> str:
    """Returns the output of a command that succeeds."""
    result = subprocess.run(
        command,
        **{
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "timeout": deadline_s(900),
            **options,
        },
        check=False,
        text=True,
    )
    assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}"
    return result.stdout


def built(directory: Path, **options: object) -> Path:
    """Returns the folder of the package that a fresh clone builds."""
    run("git", "clone", "--quiet", ROOT, directory, **options)
    run(sys.executable, directory / "tests" / "release" / "build.py", **options)
    return directory / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("package") / "clone")


# --- contents ---------------------------------------------------------------------------------


def tracked(*folders: str) -> set[str]:
    files = ["git", "ls-tree", "-r", "--name-only", "HEAD", *folders]
    return set(run(*files, cwd=ROOT).splitlines())


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_wheel_has_the_two_packages_and_metadata(dist: Path) -> None:
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    information = {f"hostopt-{VERSION}.dist-info/{name}" for name in METADATA}
    assert names == tracked("hostopt", "estimator_ext") | information
    assert {"hostopt/py.typed", "estimator_ext/py.typed"} <= names


def test_the_source_archive_has_all_files_of_the_repository(dist: Path) -> None:
    with tarfile.open(dist / SOURCE) as archive:
        names = {member.name for member in archive if member.isfile()}
    made = {"PKG-INFO", *(f"hostopt.egg-info/{name}" for name in EGG_INFO)}
    assert names == {f"hostopt-{VERSION}/{name}" for name in tracked() | made}


def test_another_user_builds_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    changed = {**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    assert sums(built(tmp_path / "other", env=changed, umask=0o077)) == sums(dist)


def test_the_tree_and_the_source_archive_give_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    tree = dist.parent
    time_s = run("git", "log", "-1", "--format=%ct", cwd=tree).strip()
    command = (UV, "build", "--wheel", "--build-constraints", "constraints.txt")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": time_s}
    run(*command, "--out-dir", tmp_path, tree, cwd=tree, env=environment, umask=0o022)
    assert sums(tmp_path)[WHEEL] == sums(dist)[WHEEL]


def test_the_index_accepts_the_metadata(dist: Path) -> None:
    run(UV, "tool", "run", "twine", "check", "--strict", *dist.iterdir())


def test_the_changelog_begins_with_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", VERSION]


def test_later_versions_find_checkpoints_of_this_one() -> None:
    files = [Path(name) for name in tracked(f"tests/data/legacy/{VERSION}")]
    saved = {(path.parts[4], path.parts[5]) for path in files if path.suffix == ".index"}
    assert saved == {(tensorflow, case) for tensorflow in ("2.15", "2.21") for case in SAVED_BY}


# --- installed --------------------------------------------------------------------------------


Shell = Callable[..., str]


def python_of(version: str) -> str:
    python = find_python(version)
    assert python is not None, f"found no Python {version}: install one"
    return python


@pytest.fixture(params=PYTHONS)
def installed(request: pytest.FixtureRequest, dist: Path, tmp_path: Path) -> tuple[Path, Shell]:
    """An environment with the package alone, and what runs a command of it."""
    environment, work = tmp_path / "environment", tmp_path / "work"
    run(UV, "venv", "--quiet", "--seed", "--python", python_of(request.param), environment)
    python = environment / "bin" / "python"
    run(UV, "pip", "install", "--quiet", "--python", python, f"{dist / WHEEL}[metrics]")
    work.mkdir()
    shutil.copy(ROOT / "examples" / "minimal" / "main.py", work)
    path = f"{environment / 'bin'}:/usr/bin:/bin"
    variables = {**QUIET, "PATH": path, "HOME": str(work)}

    def shell(command: str, **changes: str) -> str:
        output = run("bash", "-c", command, cwd=work, env={**variables, **changes})
        print(f"$ {command}\n{output}", end="")
        return output

    return environment, shell


def test_a_stranger_installs_trains_and_uninstalls(installed: tuple[Path, Shell]) -> None:
    environment, shell = installed
    assert shell("hostopt --version") == f"hostopt {VERSION}\n"
    assert shell("python -m estimator_ext --version").endswith(f"hostopt {VERSION}\n")
    shell("pip check")
    assert f"hostopt {VERSION}" in shell("hostopt doctor")
    output = shell("hostopt run -np 2 --metrics-port 0 -- python main.py")
    result = re.search(r"^\[chief:0\] step 200: accuracy (\S+)$", output, re.MULTILINE)
    assert result is not None, output
    assert float(result[1]) > 0.9
    shell("pip uninstall --quiet --yes hostopt")
    left = [
        path
        for path in environment.rglob("*")
        if re.match(r"(hostopt|estimator_ext)\b", path.name)
    ]
    assert left == []
    shutil.rmtree(environment)  # a gigabyte or two


@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("extra", ["draw", "mpi", "ray"])
def test_an_extra_resolves(dist: Path, tmp_path: Path, extra: str, version: str) -> None:
    wanted = tmp_path / "wanted.txt"
    wanted.write_text(f"hostopt[{extra}] @ {(dist / WHEEL).as_uri()}\n")
    resolved = run(UV, "pip", "compile", "--quiet", "--python-version", version, wanted)
    package = {"draw": "matplotlib", "mpi": "mpi4py", "ray": "ray"}[extra]
    assert re.search(rf"^{package}==", resolved, re.MULTILINE)
