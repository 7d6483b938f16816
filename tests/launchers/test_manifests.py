"""Manifests that `hostopt k8s` prints."""

from __future__ import annotations

import os
import subprocess

import pytest
from harness import PROGRAMS, ROOT
from k8s_training import TRAINING

from hostopt.commands.k8s import KINDS, Training, to_json

SCHEMAS = ROOT / ".launchers" / "schemas" / "bin" / "python"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [TRAINING, Training("a", "b", ["c"], 1)])
def test_the_schemas_accept_them(kind: str, training: Training) -> None:
    manifests = KINDS[kind](training)
    result = subprocess.run(
        [str(SCHEMAS), str(PROGRAMS / "validates_manifests.py")],
        input=to_json(manifests),
        capture_output=True,
        check=False,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [each["kind"] for each in manifests]
