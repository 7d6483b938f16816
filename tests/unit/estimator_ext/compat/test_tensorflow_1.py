"""Which programs were written for TensorFlow 1, by their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator_ext.compat.tensorflow_1 import file_of_module, use_of_tensorflow_1

TF = "import tensorflow as tf\n"
V1 = "import tensorflow.compat.v1 as tf\n"
MAIN = 'if __name__ == "__main__":\n  '


@pytest.mark.parametrize(
    ("source", "use"),
    [
        (TF + "flags = tf.flags", "tf.flags"),
        ("import tensorflow\ntensorflow.logging.info('')", "tf.logging.info"),
        (TF + "class Own(tf.train.Optimizer): pass", "tf.train.Optimizer"),
        (TF + MAIN + "tf.app.run()", "tf.app.run"),
        (TF + f"def main():\n  tf.logging.info('')\n{MAIN}main()", "tf.logging.info"),
        (TF + "def f(x=tf.placeholder): pass", "tf.placeholder"),
        (V1 + "def f(x):\n  return x.shape[-1].value", "x.shape[-1].value"),
        (V1 + "def f(x):\n  return x.get_shape()[0].value", "x.get_shape()[0].value"),
        # also in TensorFlow 2, or there under the same name
        (TF + "tf.train.Checkpoint()\ntf.estimator.Estimator", ""),
        (TF + "tf.no_such_name", ""),
        (TF + "tf.contrib.layers", ""),
        (V1 + "tf.flags", ""),
        ("from tensorflow.compat import v1 as tf\ntf.flags", ""),
        # perhaps
        (TF + "def later():\n  tf.logging.info('')", ""),
        (TF + "try:\n  tf.flags\nexcept AttributeError: pass", ""),
        (TF + "if tf.__version__ < '2':\n  tf.enable_eager_execution()", ""),
        (TF + "f = lambda: tf.flags", ""),
        (TF + "x = tf.flags if hasattr(tf, 'flags') else tf.compat.v1.flags", ""),
        (TF + "tf = tf.compat.v1\ntf.flags", ""),
        (TF + "tf.flags = tf.compat.v1.flags\ntf.flags.FLAGS", ""),
        (TF + V1 + "tf.flags", ""),
        (TF + "def f(x):\n  return x.shape[-1].value", ""),
        (V1 + "proto.shape.value", ""),
        (TF + "tf.flags(", ""),
    ],
)
def test_a_use_of_tensorflow_1(tmp_path: Path, source: str, use: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(source)
    assert use_of_tensorflow_1(str(program)) == use


def test_the_file_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__", "module", "__main__"):
        (package / f"{name}.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    assert file_of_module("package.module") == str(package / "module.py")
    assert file_of_module("package") == str(package / "__main__.py")
    assert file_of_module("package.other") == file_of_module("no.such.module") == ""
