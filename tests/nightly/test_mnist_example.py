"""The MNIST example, started with the launcher and by hand with TF_CONFIG."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import trustme
from certificates import write_tls_dir
from exports import operation_types
from harness import ROOT, run_python
from ranks import Ranks

import estimator_ext

estimator_ext.install()


MAIN = ROOT / "examples" / "mnist" / "main.py"


def test_chief_worker_and_evaluators_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tmp_path / "model"
    options = ("-np", 2, "--evaluators", 2, "--verbose", "--", sys.executable, MAIN)
    arguments = ("--steps", 400, "--model-dir", model_dir)
    done = run_python("-m", "hostopt", "run", *options, *arguments, limit_s=280)
    accuracy = re.search(r"^\[chief:0\] test accuracy: ([0-9.]+)$", done.stdout, re.MULTILINE)
    assert float(accuracy[1]) > 0.9
    for role in ("chief:0", "worker:0", "evaluator:0", "evaluator:1"):
        assert len(re.findall(rf"^\[{role}\] data: ", done.stdout, re.MULTILINE)) == 1
    assert re.search(r"^\[chief:0\] training: [0-9.]+ steps/s", done.stdout, re.MULTILINE)
    assert f"tensorboard --logdir {model_dir}" in done.stdout
    evaluated = r"\[evaluator:(\d)\].*Saving dict for global step 400: accuracy = ([0-9.]+)"
    evaluations = dict(re.findall(evaluated, done.stderr))
    # each evaluator reads half of the images and reports the accuracy of all, as the chief does
    assert {index: f"{float(value):.4f}" for index, value in evaluations.items()} == {
        "0": accuracy[1],
        "1": accuracy[1],
    }
    assert tf.train.latest_checkpoint(str(model_dir)).endswith("model.ckpt-400")
    monkeypatch.syspath_prepend(str(MAIN.parent))
    check_export(model_dir, tmp_path)


def check_export(model_dir: Path, directory: Path) -> None:
    """Checks that the exported model predicts the same in plain TensorFlow."""
    model_fn = importlib.import_module("main").make_model_fn(learning_rate=2e-3, hidden=64)
    estimator = estimator_ext.Estimator(model_fn, str(model_dir))

    def receiver() -> Any:
        images = tf.compat.v1.placeholder(tf.float32, [None, 28, 28, 1])
        return tf.estimator.export.TensorServingInputReceiver(images, {"images": images})

    images = np.random.default_rng(0).random((20, 28, 28, 1), np.float32)
    predicted = estimator.predict(lambda: tf.data.Dataset.from_tensors(images))
    export = Path(estimator.export_saved_model(str(directory / "export"), receiver).decode())
    loaded = tf.saved_model.load(str(export)).signatures["serving_default"]
    actual = loaded(images=tf.constant(images))["probabilities"]
    expected = [each["probabilities"] for each in predicted]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    assert not any("PyFunc" in kind for kind in operation_types(export))


def test_two_workers_by_hand(tmp_path: Path, ranks: Ranks) -> None:
    arguments = ["--steps", "60", "--model-dir", str(tmp_path / "model")]
    first, second = ranks.run(str(MAIN), 2, arguments=arguments)
    assert "test accuracy: " in first.output
    assert "test accuracy: " not in second.output
    assert "Loss for final step" in second.output


def test_two_workers_over_mutual_tls(tmp_path: Path, ranks: Ranks) -> None:
    directory = write_tls_dir(tmp_path / "tls", trustme.CA())
    arguments = ["--steps", "300", "--model-dir", str(tmp_path / "model")]
    environ = {"HOSTOPT_TLS_DIR": str(directory), "HOSTOPT_COMMUNICATION": "grpc"}
    first, _ = ranks.run(str(MAIN), 2, arguments=arguments, environ=environ)
    accuracy = re.search(r"test accuracy: ([0-9.]+)", first.output)
    assert float(accuracy[1]) > 0.9
