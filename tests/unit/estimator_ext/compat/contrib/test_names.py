"""tf.contrib: names that are found elsewhere, and refusals of the others."""

from __future__ import annotations

import importlib
import operator
import pkgutil

import numpy as np
import pytest
import tensorflow as tf

import estimator_ext
from estimator_ext.__main__ import _refusal
from estimator_ext.compat.contrib import names
from estimator_ext.errors import UnsupportedError

estimator_ext.install(contrib=True)

PLACES = {  # the name, and where TensorFlow has the same object
    "cluster_resolver.TPUClusterResolver": "distribute.cluster_resolver.TPUClusterResolver",
    "data.Dataset": "data.Dataset",
    "data.map_and_batch": "data.experimental.map_and_batch",
    "data.python.ops.batching.unbatch": "data.experimental.unbatch",
    "distributions.Normal": "distributions.Normal",
    "eager.python.tfe.executing_eagerly": "executing_eagerly",
    "framework.nest.flatten": "nest.flatten",
    "framework.python.framework.checkpoint_utils.list_variables": "train.list_variables",
    "framework.sort": "sort",
    "rnn.python.ops.rnn_cell.GRUCell": "nn.rnn_cell.GRUCell",
    "rnn.static_bidirectional_rnn": "nn.static_bidirectional_rnn",
    "summary.all_summary_ops": "summary.all_v2_summary_ops",
    "tpu.cross_replica_sum": "tpu.cross_replica_sum",
    "util.constant_value": "get_static_value",
}
SERVED = [
    "crf.python.ops.crf.crf_log_likelihood",
    "framework.deprecated",
    "learn.learn_runner.run",
    "learn.python.learn.estimators.run_config.RunConfig",
    "learn.python.learn.utils.saved_model_export_utils.make_export_strategy",
    "opt.python.training.lazy_adam_optimizer.LazyAdamOptimizer",
    "predictor.predictor_factories.from_saved_model",
    "summary.summary.always_record_summaries",
    "tensorboard.plugins.projector.ProjectorConfig",
    "tpu.python.tpu.tpu_config.TPUConfig",
    "training.python.training.hparam.HParams",
]


def of_contrib(name: str) -> object:
    return operator.attrgetter(f"contrib.{name}")(tf)


def imported(name: str) -> object:
    """Does what `from tensorflow.contrib.MODULE import NAME` does."""
    module, _, last = f"tensorflow.contrib.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", [*PLACES, *SERVED])
def test_names_are_attributes_and_can_be_imported(name: str) -> None:
    found = of_contrib(name)
    assert imported(name) is found
    if name in PLACES:
        assert found is operator.attrgetter(PLACES[name])(tf.compat.v1)


def test_the_names_of_learn() -> None:
    assert tf.contrib.learn.ModeKeys.INFER == "infer"
    assert tf.contrib.learn.ModeKeys.TRAIN == "train"
    assert issubclass(tf.contrib.learn.RunConfig, tf.compat.v1.estimator.RunConfig)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("cudnn_rnn.CudnnLSTM", "LSTMBlockFusedCell"),
        ("learn.python.learn.estimators.estimator.Estimator", "Train with tf.estimator.Estimator"),
        ("opt.ShampooOptimizer", "Use an optimizer of tf.compat.v1.train"),
        ("quantize", "Replace it in the program"),
        ("seq2seq.AttentionWrapper", "Copy the class from the source of TensorFlow 1.15"),
    ],
)
def test_other_names_are_refused_with_advice(name: str, advice: str) -> None:
    with pytest.raises(UnsupportedError, match=f"which TensorFlow removed. .*{advice}"):
        of_contrib(name)
    if "." in name:
        module, _, last = f"tensorflow.contrib.{name}".rpartition(".")
        statement = f"from {module} import {last}"
    else:
        statement = f"import tensorflow.contrib.{name}"
    with pytest.raises(ImportError) as raised:
        exec(statement)
    refusal = str(_refusal(raised.value))
    assert advice in refusal
    assert f"tf.contrib.{name.partition('.')[0]}" in refusal


def test_a_program_can_ask_for_a_name_before_it_uses_it() -> None:
    assert hasattr(tf.contrib, "crf")
    assert not hasattr(tf.contrib, "quantize")
    assert not hasattr(tf.contrib.seq2seq, "AttentionWrapper")


def test_a_name_of_a_missing_package_is_refused_with_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "_PACKAGES", {"no_such_package": "Run pip install it"})
    sources = {**names._SOURCES, "ffmpeg": ("no_such_package:",)}
    monkeypatch.setattr(names, "_SOURCES", sources)
    with pytest.raises(UnsupportedError, match=r"contrib.ffmpeg.x, .* Run pip install it"):
        of_contrib("ffmpeg.x")


def test_every_source_can_be_imported() -> None:
    for sources in names._SOURCES.values():
        for source in sources:
            try:
                pkgutil.resolve_name(source)
            except ModuleNotFoundError as error:
                assert error.name in names._PACKAGES
    for place in names._NAMES.values():
        pkgutil.resolve_name(place)


# -- functions that have another form today --------------------------------------------------


def test_datasets() -> None:
    data = tf.contrib.data
    numbers = tf.data.Dataset.range(5)
    full = numbers.apply(data.batch_and_drop_remainder(2))
    assert [each.tolist() for each in full.as_numpy_iterator()] == [[0, 1], [2, 3]]


def test_tables() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = tf.contrib.lookup.index_table_from_tensor(mapping=["a", "b"], num_oov_buckets=1)
        words = tf.contrib.lookup.index_to_string_table_from_tensor(mapping=["a", "b"])
        session.run(tf.compat.v1.tables_initializer())
        assert session.run(table.lookup(tf.constant(["b", "x"]))).tolist() == [1, 2]
        assert session.run(words.lookup(tf.constant([0, 7], tf.int64))).tolist() == [b"a", b"UNK"]


def test_tile_batch() -> None:
    states = (tf.constant([[1, 2], [3, 4]]), [tf.constant([5, 6])])
    first, (second,) = tf.contrib.seq2seq.tile_batch(states, multiplier=2)
    assert first.numpy().tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert second.numpy().tolist() == [5, 5, 6, 6]
    with tf.Graph().as_default():
        unknown = tf.compat.v1.placeholder(tf.float32, [None, 3])
        assert tf.contrib.seq2seq.tile_batch(unknown, 2).shape.as_list() == [None, 3]


@pytest.mark.parametrize("over_time", [True, False])
@pytest.mark.parametrize("over_batch", [True, False])
def test_sequence_loss(over_time: bool, over_batch: bool) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=[2, 3, 4])
    targets = random.integers(0, 4, [2, 3])
    weights = np.array([[1.0, 1.0, 0.5], [0.0, 0.0, 0.0]])
    actual = tf.contrib.seq2seq.sequence_loss(
        tf.constant(logits),
        tf.constant(targets),
        tf.constant(weights),
        average_across_timesteps=over_time,
        average_across_batch=over_batch,
    )
    chances = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    losses = -np.log(np.take_along_axis(chances, targets[..., None], 2)[..., 0]) * weights
    if over_time and over_batch:
        expected = losses.sum() / weights.sum()
    elif over_batch:
        expected = losses.sum(0) / weights.sum(0)
    elif over_time:
        expected = np.array([losses[0].sum() / 2.5, 0.0])
    else:
        expected = losses
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
