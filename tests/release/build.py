"""Builds the wheel and the source archive of the last commit in dist: the same bytes each time."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import uv

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"


def main() -> None:
    """Builds both in a clean tree: the wheel from the source archive, as installers do."""
    show = ["git", "log", "-1", "--format=%ct"]
    committed_s = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    environment = {**os.environ, "SOURCE_DATE_EPOCH": committed_s.strip()}
    # the wheel names the release of setuptools, so that is pinned
    command = [uv.find_uv_bin(), "build", "--build-constraints", str(ROOT / "constraints.txt")]
    os.umask(0o022)
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        archive = [
            "git",
            "archive",
            "--prefix",
            "tree/",
            "--output",
            f"{scratch}/tree.tar",
            "HEAD",
        ]
        subprocess.run(archive, cwd=ROOT, check=True)
        shutil.unpack_archive(f"{scratch}/tree.tar", scratch)
        sdist = [*command, "--sdist", "--out-dir", scratch, f"{scratch}/tree"]
        subprocess.run(sdist, check=True, env=environment)
        (source,) = Path(scratch).glob("*.tar.gz")
        DIST.mkdir()
        normalize(source, DIST / source.name, int(committed_s))
    wheel = [*command, "--wheel", "--out-dir", str(DIST), str(DIST / source.name)]
    subprocess.run(wheel, check=True, env=environment)
    (DIST / ".gitignore").unlink(missing_ok=True)  # of uv


def normalize(archive: Path, to: Path, time_s: int) -> None:
    """Copies an archive of setuptools, which has the time, user and umask of its build."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(tarfile.open(archive))
        file = stack.enter_context(to.open("wb"))
        zipped = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=time_s))
        target = stack.enter_context(tarfile.open(fileobj=zipped, mode="w"))
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = time_s, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers.clear()
            target.addfile(member, source.extractfile(member) if member.isfile() else None)


if __name__ == "__main__":
    main()
