"""What `--check` says of small programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator_ext.compat.check import check
from estimator_ext.compat.compat import install

TF = "import tensorflow as tf\n"
DEF = "def f(x):\n  return "
REPLACE = "Replace it in the program, or remove the code that needs it"
HVD = "import horovod.tensorflow as hvd\n"
WITH_HVD = "Then run it with --hvd"
ELASTIC = "Save checkpoints, and start the program with `hostopt run --max-restarts`. " + WITH_HVD
LINE_1 = f"(line 1): {ELASTIC}"
CALLBACK = f"horovod.tensorflow.keras.callbacks.Callback (line 2): {REPLACE}. {WITH_HVD}"
MAIN = '\nif __name__ == "__main__":\n  f(1)\n'


def said(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], int]:
    """The lines for files, without their folder, and the exit code."""
    install(contrib=True)
    code = check(str(path))
    lines = capsys.readouterr().out.splitlines()
    return [line.rpartition("/")[2] for line in lines if ".py: " in line], code


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (TF + "tf.estimator.Estimator(f)", "runs"),
        (TF + "tf.contrib.tpu.TPUConfig()\nfrom tensorflow.contrib import rnn", "runs"),
        ("import tensorflow.compat.v1 as tf\ntf.flags", "runs"),
        (TF + "tf.flags", "runs with --v1"),
        (TF + DEF + "tf.placeholder(x)", "runs with --v1"),
        ("from tensorflow import flags", "runs with --v1"),
        (TF + DEF + "x.shape[0].value", "runs with --v1"),
        (TF + "tf.none.x", f"needs tf.none (line 2): {REPLACE}"),
        (TF + DEF + "tf.none(tf.none)", f"needs tf.none when called (line 3): {REPLACE}"),
        (TF + DEF + "tf.none" + MAIN, f"needs tf.none (line 3): {REPLACE}"),
        ("from tensorflow.contrib import none", f"needs tf.contrib.none (line 1): {REPLACE}"),
        ("import tensorflow.contrib.none", f"needs tf.contrib.none (line 1): {REPLACE}"),
        (TF + "c = tf.contrib\nc.none", f"needs tf.contrib.none (line 3): {REPLACE}"),
        (
            TF + "tf.flags\ntf.contrib.none",
            f"needs tf.contrib.none (line 3): {REPLACE}. Then run it with --v1",
        ),
        (TF + "import numpy as np\nnp.int_\nnp.none", f"needs numpy.none (line 4): {REPLACE}"),
        (TF + "import no_such.x", "needs the package no_such (line 2): Install it"),
        (HVD + "hvd.init()", "runs with --hvd"),
        (TF + "from horovod.tensorflow.mpi_ops import rank", "runs with --hvd"),
        (HVD + "hvd.Compression.fp16\nhvd.mpi_ops.rank()", "runs with --hvd"),
        ("import horovod.tensorflow.keras as hvd\nhvd.callbacks.Callback", f"needs {CALLBACK}"),
        (HVD + "hvd.elastic.run(f)", f"needs horovod.tensorflow.elastic (line 2): {ELASTIC}"),
        ("from horovod.tensorflow import elastic", f"needs horovod.tensorflow.elastic {LINE_1}"),
        ("from horovod import torch", f"needs horovod.torch (line 1): {REPLACE}. {WITH_HVD}"),
        (TF + "tf.distribute.MirroredStrategy()", "runs"),
        (TF + "P(use_tpu=True)", "needs use_tpu=False (line 2): There is no TPU. Pass False"),
        # if they exist
        (TF + "try:\n  tf.none\nexcept AttributeError:\n  tf.none", "runs"),
        ("try:\n  from tensorflow import none as x\nexcept ImportError: x = 0\nx.y", "runs"),
        (TF + "if hasattr(tf, 'none'):\n  tf.none", "runs"),
        (TF + "x = tf.none if tf.__version__ < '2' else 0", "runs"),
        (TF + "old = tf.__version__ < '2'\nif old:\n  tf.none", "runs"),
        # other things of the same name
        ("from tensorflow.contrib import rnn\n" + DEF.replace("x", "rnn") + "rnn.none", "runs"),
        ("from tensorflow.contrib import rnn\nrnn = f\nrnn.none", "runs"),
        (TF + "tf.none = 1\ntf.none", "runs"),
    ],
)
def test_the_word_for_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, word: str
) -> None:
    (tmp_path / "program.py").write_text(source)
    lines, code = said(tmp_path / "program.py", capsys)
    assert lines == [f"program.py: {word}"]
    assert code == (0 if word.startswith("runs") else 78)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (TF + "print 'x'", "cannot run (line 2): Python 3 cannot read it: Missing parentheses"),
        (
            TF + "tf.distribute.experimental.ParameterServerStrategy()",
            "cannot use tf.distribute.experimental.ParameterServerStrategy (line 2): There are no",
        ),
        (TF + DEF + "tf.train.Server(x)", "cannot use tf.train.Server when called (line 3): It"),
        (TF + "import urllib2", "cannot import urllib2 (line 2): This Python does not have it"),
        (
            TF + DEF + "tf.compat.v1.train.MonitoredTrainingSession()" + MAIN,
            "cannot train on ranks with tf.compat.v1.train.MonitoredTrainingSession when called",
        ),
    ],
)
def test_what_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, word: str
) -> None:
    (tmp_path / "program.py").write_text(source)
    lines, code = said(tmp_path / "program.py", capsys)
    assert lines[0].startswith(f"program.py: {word}")
    assert code == 78


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program fails with what it imports; files without TensorFlow are counted."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(TF + "tf.contrib.none")
    (package / "train.py").write_text(TF + "from package import model\ntf.estimator.Estimator(f)")
    (package / "data.py").write_text("from . import model")
    install(contrib=True)
    assert check(str(package)) == 78
    place = f"{REPLACE}\n"
    out = capsys.readouterr().out
    assert f"package/model.py: needs tf.contrib.none (line 2): {place}" in out
    assert f"package/train.py: needs tf.contrib.none (model.py:2): {place}" in out
    assert "programs: 1 needs\nmodules: 1 needs\n" in out
    assert out.endswith("without TensorFlow: 2 files\n")


def test_an_installed_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorFlow, which lies beside it, is not part of it."""
    for package, source in (("tensorflow", "import no_such"), ("mine", TF + "import mine.model")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)
    (tmp_path / "mine" / "model.py").write_text(TF + "tf.none")
    lines, code = said(tmp_path / "mine", capsys)
    assert lines[0] == f"__init__.py: needs tf.none (model.py:2): {REPLACE}"
    assert code == 78
