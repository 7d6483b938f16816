"""install() and programs for tf.estimator on all TensorFlow versions, in new processes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from harness import PROGRAMS, run_python

import estimator_ext
from estimator_ext._tf_estimator._loading import knows_estimator

PROGRAM = PROGRAMS / "written_for_2_15.py"
# Tests that docs/compatibility.md lists as impossible if TensorFlow itself has Estimator.
without_estimator = pytest.mark.skipif(
    knows_estimator(), reason="TensorFlow 2.15 has Estimator, Keras 2 and the TPU part itself"
)


def start(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments; TF_USE_LEGACY_KERAS is not set unless the test sets it."""
    return run_python(*arguments, without="TF_USE_LEGACY_KERAS", **options)


def run(code: str, **environment: str) -> str:
    """Runs code, which must succeed, and returns its output."""
    return start("-c", code, **environment).stdout


def refusal_of(code: str, **environment: str) -> str:
    """Runs code, which must fail, and returns its errors."""
    ended = start("-c", code, code=None, **environment)
    assert ended.returncode != 0
    return ended.stderr


# -- whole programs ------------------------------------------------------------------------


LINES = {"one_line_more": "import estimator_ext; estimator_ext.install()\n"}
if knows_estimator():
    LINES["unchanged"] = ""


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_a_program_written_for_2_15(tmp_path: Path, line: str) -> None:
    text = PROGRAM.read_text()
    assert "estimator_ext" not in text
    program = tmp_path / "program.py"
    program.write_text(text.replace("\nFEATURES", f"\n{line}\nFEATURES", 1))
    ended = start(program, tmp_path)
    (text,) = [line[7:] for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(text)
    # the output of the unchanged program on TensorFlow 2.15.1
    assert result["canned"]["global_step"] == 300
    assert result["canned"]["accuracy"] == 1.0
    assert result["canned"]["average_loss"] == pytest.approx(4.60087503597606e-05, rel=1e-4)
    assert result["canned"]["prediction/mean"] == pytest.approx(0.4666643738746643, rel=1e-6)
    assert result["custom"]["global_step"] == 101  # stopped early
    assert result["custom"]["accuracy"] == 1.0
    assert result["custom"]["loss"] == pytest.approx(0.0017014313489198685, rel=1e-4)


def test_estimators_of_every_kind(tmp_path: Path) -> None:
    ended = start(PROGRAMS / "kinds.py", tmp_path)
    losses = json.loads(ended.stdout.splitlines()[-1])
    assert len(losses) == 10
    for name, (before, after) in losses.items():
        assert after < before, name


# -- the names -----------------------------------------------------------------------------

NAMES = [
    "BestExporter",
    "DNNClassifier",
    "DNNLinearCombinedRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "FinalExporter",
    "LatestExporter",
    "LinearClassifier",
    "LoggingTensorHook",
    "ModeKeys",
    "RunConfig",
    "SessionRunHook",
    "StopAtStepHook",
    "TrainSpec",
    "WarmStartSettings",
    "experimental.InMemoryEvaluatorHook",
    "experimental.stop_if_no_decrease_hook",
    "export.ServingInputReceiver",
    "export.build_parsing_serving_input_receiver_fn",
    "train_and_evaluate",
]


@pytest.mark.parametrize("module", ["tf.estimator", "tf.compat.v1.estimator"])
def test_install_restores_the_names(module: str) -> None:
    code = f"""
import tensorflow as tf
of_v1 = tf.compat.v1
import estimator_ext
estimator_ext.install()
assert of_v1.estimator is tf.compat.v1.estimator
estimator_ext.install()  # a second call changes nothing
for name in {NAMES}:
    assert eval("{module}." + name), name
assert issubclass(estimator_ext.Estimator, tf.estimator.Estimator)
assert issubclass(tf.estimator.Estimator, tf.compat.v1.estimator.Estimator)
assert issubclass(estimator_ext.RunConfig, tf.estimator.RunConfig)
assert tf.compat.v2.estimator.Estimator is tf.estimator.Estimator
"""
    run(code)


def test_the_names_can_be_imported() -> None:
    code = """
import estimator_ext
estimator_ext.install()
import tensorflow.compat.v1 as tf1
import tensorflow.estimator
from tensorflow.compat.v1 import estimator as of_v1
from tensorflow.estimator import export, Estimator
assert Estimator is tensorflow.estimator.Estimator
assert of_v1 is tf1.estimator
assert export.ServingInputReceiver is tensorflow.estimator.export.ServingInputReceiver
"""
    run(code)


def test_keras_is_keras_2_however_it_is_reached() -> None:
    code = """
import tensorflow as tf
import estimator_ext
estimator_ext.install()
from tensorflow.keras.layers import Dense
from tensorflow import keras
with tf.Graph().as_default():
    for layer in Dense, keras.layers.Dense, tf.keras.layers.Dense, tf.compat.v1.keras.layers.Dense:
        layer(2)(tf.ones([3, 4]))
    assert len(tf.compat.v1.global_variables()) == 8
"""
    run(code)


@pytest.mark.parametrize("switch", [{}, {"TF_USE_LEGACY_KERAS": "1"}], ids=["unset", "set"])
def test_install_may_come_after_an_import_of_keras(switch: dict[str, str]) -> None:
    code = """
import os
if os.environ.get("TF_USE_LEGACY_KERAS"):
    from tensorflow.keras.layers import Dense
import estimator_ext
from tensorflow.keras.layers import Dense
estimator_ext.install()
from tensorflow.keras.layers import Conv2D
estimator_ext.install()
"""
    run(code, **switch)


def test_install_leaves_tensorflow_unchanged() -> None:
    code = """
import sys
import tensorflow as tf
from importlib import util
from importlib.metadata import distribution
from tensorflow.python.util import tf_export

def state():
    coordinator = "tensorflow.python.distribute.estimator_training"
    return (
        # except the finder of moved modules
        [each for each in sys.meta_path if not type(each).__module__.endswith(".compat.compat")],
        list(sys.path_hooks),
        sys.path[:],
        dict(vars(tf_export)),
        {name: dict(attrs) for name, attrs in vars(tf_export).items() if name.startswith("API_A")},
        util.find_spec(coordinator) is None,
    )

before = state()
import estimator_ext
estimator_ext.install()
assert state() == before

import base64, hashlib
for file in distribution("tensorflow_estimator").files:
    if file.hash:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value, file
"""
    run(code)


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.14.1", "2.22.0", "3.0.0"])
def test_an_older_or_newer_tensorflow_is_refused_with_the_reason(version: str) -> None:
    code = f"import tensorflow as tf; tf.__version__ = '{version}'; import estimator_ext"
    errors = refusal_of(code)
    assert f"ConfigError: TensorFlow {version} is installed, wanted 2.15 to 2.21" in errors
    assert "pip install 'tensorflow>=2.15,<2.22'" in errors


@without_estimator
def test_a_tf_keras_of_another_version_is_refused() -> None:
    code = "import tensorflow as tf; tf.__version__ = '2.15.9'; import estimator_ext"
    errors = refusal_of(code)
    assert f"ConfigError: tf_keras is {tf.__version__[:4]}" in errors
    assert "wanted 2.15 for TensorFlow 2.15.9. Run pip install 'tf_keras==2.15.*'" in errors


def test_a_missing_tensorflow_estimator_is_refused() -> None:
    code = """
import importlib.metadata as metadata
import tensorflow as tf
version = metadata.version
def of_all_but_one(name):
    if name == "tensorflow_estimator":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = of_all_but_one
import estimator_ext
"""
    errors = refusal_of(code)
    assert "ConfigError: tensorflow_estimator is missing, wanted 2.15" in errors


@without_estimator
@pytest.mark.parametrize(
    ("use", "named"),
    [
        ("tf.keras.layers.Dense(1)", "tensorflow.keras"),
        ("from tensorflow.keras.layers import Dense", "tensorflow.keras"),
        ("tf.metrics.Mean()", "tensorflow.metrics"),
        ("hasattr(tf.compat.v1.layers, 'dense')", "compat.v1.layers"),
    ],
)
def test_keras_3_is_refused_with_advice(use: str, named: str) -> None:
    code = f"""
import tensorflow as tf
{use}  # imports Keras 3
import estimator_ext
print("imported")
estimator_ext.install()
"""
    ended = start("-c", code, code=None)
    assert "imported" in ended.stdout  # with a warning, as a model_fn may not need Keras
    warning, _, error = ended.stderr.partition("Traceback")
    assert re.search(rf"WARNING:tensorflow:.*{named}\b.* is Keras 3 in this process", warning)
    assert ended.returncode != 0
    assert re.search(rf"ConfigError: .*{named}\b.* is Keras 3 in this process already", error)
    assert "Set TF_USE_LEGACY_KERAS=1 in the environment before Python starts" in ended.stderr
    # the same program with the variable set before
    assert run(code, TF_USE_LEGACY_KERAS="1") == "imported\n"


@without_estimator
@pytest.mark.parametrize("remote", [False, True], ids=["TF_CONFIG", "remote_cluster"])
def test_a_strategy_of_tensorflow_on_a_cluster_is_refused(tmp_path: Path, remote: bool) -> None:
    cluster = {"chief": ["127.0.0.1:0"], "worker": ["127.0.0.1:1"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    code = f"""
import tensorflow as tf
from tensorflow.python.distribute.distribute_config import DistributeConfig
import estimator_ext
estimator_ext.install()
strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
if {remote}:
    strategies = dict(experimental_distribute=DistributeConfig(strategy, None, {cluster}))
else:
    strategies = dict(train_distribute=strategy)
config = tf.estimator.RunConfig({str(tmp_path)!r}, **strategies)
estimator = tf.estimator.Estimator(lambda features: None, config=config)
spec = tf.estimator.TrainSpec(lambda: None, 1), tf.estimator.EvalSpec(lambda: None)
tf.estimator.train_and_evaluate(estimator, *spec)
"""
    errors = refusal_of(code, **({} if remote else {"TF_CONFIG": config}))
    assert "tf.estimator.Estimator cannot work with MirroredStrategy on a cluster" in errors
    assert "estimator_ext.HostOffloadStrategy" in errors


@without_estimator
def test_workers_without_strategy_and_parameter_servers_are_warned() -> None:
    cluster = {"chief": ["127.0.0.1:0"], "worker": ["127.0.0.1:1"]}
    code = """
import estimator_ext
estimator_ext.install()
import tensorflow as tf
class Untrained(tf.estimator.Estimator):
    def train(self, *arguments, **options):
        pass  # only the warnings before it matter
    _assert_members_are_not_overridden = lambda self: None
spec = tf.estimator.TrainSpec(lambda: None, 1), tf.estimator.EvalSpec(lambda: None)
tf.estimator.train_and_evaluate(Untrained(lambda features: None), *spec)
"""
    warning = "TF_CONFIG names several workers, but RunConfig has no train_distribute"
    for more, warned in ({}, True), ({"ps": ["127.0.0.1:2"]}, False):
        config = {"cluster": {**cluster, **more}, "task": {"type": "chief", "index": 0}}
        ended = start("-c", code, TF_CONFIG=json.dumps(config))
        assert (warning in ended.stderr) == warned


@without_estimator
def test_keras_3_chosen_by_the_user_is_refused() -> None:
    errors = refusal_of("import estimator_ext as e; e.install()", TF_USE_LEGACY_KERAS="0")
    assert "TF_USE_LEGACY_KERAS is 0 in the environment: set it to 1" in errors


@without_estimator
def test_tf_estimator_tpu_is_the_module_of_this_package() -> None:
    estimator_ext.install()
    assert tf.compat.v1.estimator.tpu is estimator_ext.tpu
