"""Recommender models, a dense model with moving averages, and their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

BATCHES = 16  # made in advance and repeated
Wrap = Callable[[Any], Any]  # converts the optimizer of a model to the one of a peer

# --- DeepFM -----------------------------------------------------------------------------------

FIELDS, NUMBERS, WIDTH = 26, 13, 8  # sparse features, dense features, width of an embedding
VOCABULARIES = [1000 + 360 * field for field in range(FIELDS)]  # 1000 to 10000 ids
LAYERS = (128, 64)
_SKEW = 1.1  # exponent of the frequencies of ids


def make_deepfm(tf: Any, optimizer: str, wrap: Wrap) -> Any:
    """Returns the model function of DeepFM: 26 embeddings, 26 tables of weights, FM, two layers.

    Args:
      tf: TensorFlow with tf.estimator.
      optimizer: "adagrad" or "adam".
      wrap: converts the optimizer to one that communicates; the identity for hostopt.

    Returns:
      The model function.
    """

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        columns = tf.unstack(features["ids"], axis=1)
        rows = _look_up(tf, "embedding", columns, WIDTH)  # each [batch, WIDTH]
        weights = _look_up(tf, "weight", columns, 1)
        linear = tf.add_n([*weights, _dense(tf, "linear", features["numbers"], 1)])
        deep = tf.concat([*rows, features["numbers"]], axis=1)
        for number, units in enumerate(LAYERS):
            deep = tf.nn.relu(_dense(tf, f"layer_{number}", deep, units))
        logits = linear + _interactions(tf, rows) + _dense(tf, "logit", deep, 1)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits[:, 0])
        loss = tf.reduce_mean(losses)
        train_op = wrap(_make_optimizer(tf, optimizer)).minimize(
            loss, tf.compat.v1.train.get_global_step()
        )
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def make_clicks(batch: int, seed: int) -> tuple[dict[str, Any], Any]:
    """Draws ids with frequencies as in the logs of a site, and clicks that depend on them.

    Args:
      batch: number of examples.
      seed: seed of this rank's data; clicks depend on the ids in the same way for all seeds.

    Returns:
      Features and labels of BATCHES batches.
    """
    common, random = np.random.RandomState(0), np.random.RandomState(seed)
    shape, score = (BATCHES, batch), np.zeros((BATCHES, batch))
    ids = np.zeros((*shape, FIELDS), np.int64)
    for field, vocabulary in enumerate(VOCABULARIES):
        ids[..., field] = draw_ids(random, vocabulary, shape)
        score += common.standard_normal(vocabulary)[ids[..., field]]
    numbers = random.standard_normal((*shape, NUMBERS)).astype(np.float32)
    clicks = score / np.sqrt(FIELDS) + random.standard_normal(shape) > 0.5
    return {"ids": ids, "numbers": numbers}, clicks.astype(np.float32)


def draw_ids(random: Any, vocabulary: int, shape: tuple[int, ...]) -> Any:
    """Draws ids by Zipf's law: the k-th most frequent is about 1/k as frequent as the first."""
    frequencies = 1.0 / np.arange(1, vocabulary + 1) ** _SKEW
    return random.choice(vocabulary, shape, p=frequencies / frequencies.sum())


def _look_up(tf: Any, name: str, columns: list[Any], width: int) -> list[Any]:
    initializer = tf.compat.v1.random_normal_initializer(stddev=1e-2)
    tables = [
        tf.compat.v1.get_variable(f"{name}_{field}", [vocabulary, width], initializer=initializer)
        for field, vocabulary in enumerate(VOCABULARIES)
    ]
    return [tf.nn.embedding_lookup(table, ids) for table, ids in zip(tables, columns)]


def _interactions(tf: Any, rows: list[Any]) -> Any:
    """Sums the products of all pairs of rows: half of (square of sum - sum of squares)."""
    squares = tf.add_n([tf.square(row) for row in rows])
    return 0.5 * tf.reduce_sum(tf.square(tf.add_n(rows)) - squares, axis=1, keepdims=True)


# --- wide & deep ------------------------------------------------------------------------------

_CATEGORIES = {"education": 16, "marital_status": 7, "relationship": 6, "workclass": 9}
_NUMERIC = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
_OCCUPATIONS, _BUCKETS = 200, 1000  # occupations are hashed
_AGES = [18, 25, 30, 35, 40, 45, 50, 55, 60, 65]
_HIDDEN = [100, 75, 50, 25]


def make_wide_deep(tf: Any, model_dir: str) -> Any:
    """Returns the model function of DNNLinearCombinedClassifier with Ftrl and Adagrad.

    Args:
      tf: TensorFlow with tf.estimator.
      model_dir: directory of the canned estimator, which is not trained.

    Returns:
      The model function.
    """
    wide, deep = _make_columns(tf.feature_column)
    canned = tf.compat.v1.estimator.DNNLinearCombinedClassifier(
        model_dir,
        linear_feature_columns=wide,
        linear_optimizer=tf.compat.v1.train.FtrlOptimizer(0.1),
        dnn_feature_columns=deep,
        dnn_optimizer=tf.compat.v1.train.AdagradOptimizer(0.05),
        dnn_hidden_units=_HIDDEN,
        loss_reduction=tf.compat.v1.losses.Reduction.SUM_OVER_BATCH_SIZE,
    )
    return canned.model_fn


def make_census(batch: int, seed: int) -> tuple[dict[str, Any], Any]:
    """Draws persons with numeric and text features, and a label for high income.

    Args:
      batch: number of examples.
      seed: seed of this rank's data.

    Returns:
      Features and labels of BATCHES batches.
    """
    random, shape = np.random.RandomState(seed), (BATCHES, batch)
    features = {name: random.rand(*shape).astype(np.float32) for name in _NUMERIC}
    features["age"] = random.randint(17, 90, shape).astype(np.float32)
    score = features["age"] / 90 + features["hours_per_week"]
    for name, count in {**_CATEGORIES, "occupation": _OCCUPATIONS}.items():
        ids = draw_ids(random, count, shape)
        features[name] = np.array(_words(name, count))[ids]
        score = score + np.cos(ids)
    return features, (score > 1.0).astype(np.int64)


def _make_columns(columns: Any) -> tuple[list[Any], list[Any]]:
    numeric = {name: columns.numeric_column(name) for name in _NUMERIC}
    ages = columns.bucketized_column(numeric["age"], _AGES)
    words = [
        columns.categorical_column_with_vocabulary_list(name, _words(name, count))
        for name, count in _CATEGORIES.items()
    ]
    occupation = columns.categorical_column_with_hash_bucket("occupation", _BUCKETS)
    crossed = [
        columns.crossed_column(["education", "occupation"], _BUCKETS),
        columns.crossed_column([ages, "education", "occupation"], _BUCKETS),
    ]
    deep = [*numeric.values(), *(columns.indicator_column(word) for word in words)]
    deep.append(columns.embedding_column(occupation, WIDTH))
    return [*words, occupation, ages, *crossed], deep


def _words(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)]


# --- a dense model with 100 variables ---------------------------------------------------------

_DEPTH, _UNITS = 50, 128


def make_deep(tf: Any, averages: bool) -> Any:
    """Returns the model function of 50 dense layers.

    Args:
      tf: TensorFlow with tf.estimator.
      averages: True keeps exponential moving averages of its 100 variables.

    Returns:
      The model function.
    """

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        x = features
        for number in range(_DEPTH):
            x = x + 0.1 * tf.tanh(_dense(tf, f"layer_{number}", x, _UNITS))
        loss = tf.reduce_mean(tf.square(tf.reduce_mean(x, axis=1) - labels))
        train_op = _make_optimizer(tf, "adam").minimize(loss, tf.compat.v1.train.get_global_step())
        if averages:
            average = tf.train.ExponentialMovingAverage(0.99)
            with tf.control_dependencies([train_op]):
                train_op = average.apply(tf.compat.v1.trainable_variables())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def make_numbers(batch: int, seed: int) -> tuple[Any, Any]:
    """Draws random features, and the sign of their mean as labels.

    Args:
      batch: number of examples.
      seed: seed of this rank's data.

    Returns:
      Features and labels of BATCHES batches.
    """
    random = np.random.RandomState(seed)
    features = random.standard_normal((BATCHES, batch, _UNITS)).astype(np.float32)
    return features, np.sign(features.mean(-1))


# --- parts ------------------------------------------------------------------------------------


def _dense(tf: Any, name: str, x: Any, units: int) -> Any:
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [x.shape[-1], units])
        bias = tf.compat.v1.get_variable(
            "bias", [units], initializer=tf.compat.v1.zeros_initializer()
        )
    return tf.matmul(x, kernel) + bias


def _make_optimizer(tf: Any, name: str) -> Any:
    if name == "adam":
        return tf.compat.v1.train.AdamOptimizer(1e-3)
    return tf.compat.v1.train.AdagradOptimizer(0.05)
