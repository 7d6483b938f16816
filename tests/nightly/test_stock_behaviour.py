"""Results of canned models equal the stock Estimator: metrics, exports and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from exports import operation_types
from programs import canned
from ranks import Ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of the stock classes and of 1 and 2 ranks, started from one checkpoint."""
    directory = tmp_path_factory.mktemp("canned")
    logs = directory / "logs"
    logs.mkdir()
    runs = [
        ("start", "start", 1, None),
        ("stock", "stock", 1, "start"),
        ("ranks", "one", 1, "start"),
        ("ranks", "two", 2, "start"),
        ("local", "local", 2, "start"),
        ("later", "stock after stock", 1, "stock"),
        ("later", "stock after two", 1, "two"),
    ]
    with Ranks(logs) as ranks:
        for kind, name, size, after in runs:
            if after:
                shutil.copytree(directory / after, directory / name)
            ranks.run("canned.py", size, arguments=[kind, str(directory / name)])
    return directory


def variables(model_dir: Path) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize("ranks", ["one", "two", "local"])
@pytest.mark.parametrize("name", canned.NAMES)
def test_canned_models_train_like_the_stock_class(trained: Path, name: str, ranks: str) -> None:
    stock, ours = variables(trained / "stock" / name), variables(trained / ranks / name)
    start = variables(trained / "start" / name)
    assert stock["global_step"] == ours["global_step"] == canned.STEPS
    assert stock.keys() == ours.keys()
    for key, expected in stock.items():
        np.testing.assert_allclose(ours[key], expected, rtol=0, atol=1e-6, err_msg=key)
    assert any(np.abs(stock[key] - start[key]).max() > 1e-2 for key in stock)


@pytest.mark.parametrize("name", canned.NAMES)
def test_the_stock_class_resumes_from_a_checkpoint_of_two_ranks(trained: Path, name: str) -> None:
    expectation = variables(trained / "stock after stock" / name)
    result = variables(trained / "stock after two" / name)
    assert expectation["global_step"] == result["global_step"] == canned.STEPS + 3
    for key, expected in expectation.items():
        np.testing.assert_allclose(result[key], expected, rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", canned.NAMES)
def test_metrics_equal_those_of_the_stock_class(trained: Path, name: str, ranks: str) -> None:
    stock, ours = (np.load(trained / who / f"{name}-metrics.npz") for who in ("stock", ranks))
    assert set(stock) == set(ours) >= {"accuracy", "auc", "average_loss", "loss"}
    for key in stock:
        np.testing.assert_allclose(ours[key], stock[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", canned.NAMES)
def test_exported_models_predict_the_same_in_plain_tensorflow(trained: Path, name: str) -> None:
    result = {}
    for who in ("stock", "two"):
        (export,) = (trained / who / f"{name}-export").iterdir()
        predict = tf.saved_model.load(str(export)).signatures["predict"]
        result[who] = predict(x=tf.constant(canned.X[0]))["probabilities"].numpy()
        assert not any("PyFunc" in kind for kind in operation_types(export))
    np.testing.assert_allclose(result["two"], result["stock"], rtol=0, atol=1e-6)
