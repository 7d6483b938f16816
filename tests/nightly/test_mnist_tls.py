"""The MNIST example, started with the launcher and by hand with TF_CONFIG."""

from __future__ import annotations

import re
from pathlib import Path

import trustme
from certificates import write_tls_dir
from harness import ROOT
from ranks import Ranks

import estimator_ext

estimator_ext.install()


MAIN = ROOT / "examples" / "mnist" / "main.py"


def test_two_workers_over_mutual_tls(tmp_path: Path, ranks: Ranks) -> None:
    directory = write_tls_dir(tmp_path / "tls", trustme.CA())
    arguments = ["--steps", "300", "--model-dir", str(tmp_path / "model")]
    environ = {"HOSTOPT_TLS_DIR": str(directory), "HOSTOPT_COMMUNICATION": "grpc"}
    first, _ = ranks.run(str(MAIN), 2, arguments=arguments, environ=environ)
    accuracy = re.search(r"test accuracy: ([0-9.]+)", first.output)
    assert float(accuracy[1]) > 0.9
