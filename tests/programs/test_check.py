"""What `--check` says of the modules of published packages is what happens when they are imported.

These tests need an environment with the packages of published.txt (`make nightly`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from harness import PROGRAMS, QUIET

PACKAGES = ["adanet", "albert", "bert", "deepctr", "tensorflow_ranking", "tf_slim"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [[], ["--v1"]], ids=["plain", "v1"])
@pytest.mark.parametrize("package", PACKAGES)
def test_check_foretells_each_import(package: str, options: list[str]) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    command = [sys.executable, str(PROGRAMS / "imports_modules.py")]
    ran = subprocess.run(
        [*command, spec.submodule_search_locations[0], *options],
        check=True,
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1000,
    )
    files = json.loads(ran.stdout.splitlines()[-1])
    print(package, options, Counter((bool(lacks), bool(error)) for lacks, error in files.values()))
    assert files
    for name, (lacks, error) in files.items():
        assert bool(lacks) == bool(error), (name, lacks, error)
        if error:
            missing = error[1].rpartition(".")[2]
            assert any(missing in lack for lack in lacks), (name, lacks, error)
