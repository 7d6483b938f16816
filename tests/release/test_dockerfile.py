"""The Dockerfile without Docker: each stage is a copy of this machine's root, as root."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import uv
from harness import ROOT, deadline_s
from release.matrix import find_python

# the root of the stage: files that it writes are in `upper`, and what it starts ends with it
ENTER = """
mount -t overlay overlay -o lowerdir=/,upperdir="$0/upper",workdir="$0/work" "$0/root"
mount --rbind /dev "$0/root/dev"
mount -t proc proc "$0/root/proc"
exec chroot --userspec="$1" "$0/root" env --chdir="$2" "${@:3}"
"""


def instructions() -> Iterator[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        yield name, rest


class Stage:
    """A stage of the image: the files of this machine, and an environment of Python."""

    def __init__(self, path: Path, python: str) -> None:
        self._path, self._user, self._directory = path, "root", "/"
        self.upper = path / "upper"
        for name in ("upper", "work", "root"):
            (path / name).mkdir(parents=True)
        # stands for the image python:3.11-slim
        self.enter(uv.find_uv_bin(), "venv", "--quiet", "--seed", "--python", python, "/python")
        self.enter("chmod", "a+x", "/root")  # Python may be there

    def enter(self, *command: str) -> str:
        """Returns the output of a command in the root of the stage."""
        home = "/root" if self._user == "root" else f"/home/{self._user}"
        path = f"PATH=/python/bin:{os.defpath}:/usr/sbin:/sbin"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", ENTER]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        result = subprocess.run(
            [*unshare, self._path, self._user, self._directory, path, f"HOME={home}", *command],
            check=False,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s(900),
        )
        print(shlex.join(command), result.stdout, sep="\n")
        assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}"
        return result.stdout

    def inside(self, path: str) -> Path:
        """Returns where a path of an instruction is for us."""
        return self.upper / os.path.join(self._directory, path).lstrip("/")

    def follow(self, name: str, text: str, stages: dict[str, Stage], context: Path) -> None:
        """Follows an instruction, or raises an error for one that this test does not know."""
        if name == "RUN":
            self.enter("sh", "-euc", text)
        elif name == "COPY":
            *options, source, target = text.split()
            origin = context / source
            if options:
                origin = stages[options[0].replace("--from=", "")].inside(source)
            assert origin.exists(), f"COPY {text}: {source} is missing, or in .dockerignore"
            to = self.inside(target)
            if origin.is_dir():
                shutil.copytree(origin, to, dirs_exist_ok=True)
            else:
                shutil.copy(origin, to)
        elif name == "WORKDIR":
            self._directory = text
            self.inside(".").mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            self._user = text
        else:
            raise NotImplementedError(name)


def context_at(path: Path) -> Path:
    """Copies what .dockerignore leaves of the last commit."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    wanted = [line[1:] for line in lines if line.startswith("!")]
    archive = path / "context.tar"
    subprocess.run(["git", "archive", "--output", archive, "HEAD", *wanted], cwd=ROOT, check=True)
    shutil.unpack_archive(archive, path / "context")
    return path / "context"


@pytest.mark.timeout(0)  # each command has a deadline
def test_the_image_is_built_and_trains_mnist(tmp_path: Path) -> None:
    context = context_at(tmp_path)
    stages: dict[str, Stage] = {}
    command: list[str] = []
    for name, text in instructions():
        if name == "FROM":
            image, _, alias = text.partition(" AS ")
            python = find_python(re.fullmatch(r"python:([\d.]+)-slim", image)[1])
            assert python is not None, f"found no Python for {image}: install it"
            alias = alias or "last"
            stage = stages[alias] = Stage(tmp_path / alias, python)
        elif name == "ENTRYPOINT":
            command = json.loads(text)
        else:
            stage.follow(name, text, stages, context)
    assert stage.enter("id", "-un") == "hostopt\n"
    output = stage.enter(*command, "--steps", "300")
    result = re.search(r"accuracy\D*(\d\.\d+)", output)
    assert result is not None, output
    assert float(result[1]) > 0.9
    shutil.rmtree(tmp_path)  # gigabytes
