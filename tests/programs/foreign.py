"""Small models with features of published programs, written for a single process.

Each model is a function of a `Training`, which `by_name` runs alone or on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from programs import by_name
from programs.foreign_optimizers import AdamWeightDecay, Lamb, Lars
from tensorflow.python.training import moving_averages

import estimator_ext

v1 = tf.compat.v1
BATCHES, ROWS = 5, 12
RANDOM = np.random.RandomState(0)
FLOAT = tf.float64  # so that rounding hides no error, except in canned models
Spec = tf.estimator.EstimatorSpec


def words(vocabulary: int, *shape: int) -> np.ndarray:
    return RANDOM.randint(0, vocabulary, (BATCHES, ROWS, *shape))


WORD_COUNT = 6 * ROWS


def words_once() -> np.ndarray:
    batches = [RANDOM.permutation(WORD_COUNT) for _ in range(BATCHES)]
    return np.reshape(batches, (BATCHES, ROWS, 6))


def numbers(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return RANDOM.standard_normal((BATCHES, ROWS, *shape)).astype(dtype)


def dense(x: tf.Tensor, units: int, name: str, activation: Any = None) -> tf.Tensor:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [x.shape[-1], units], x.dtype)
        bias = v1.get_variable("bias", [units], x.dtype, v1.zeros_initializer())
    out = tf.tensordot(x, kernel, 1) + bias
    return activation(out) if activation else out


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses)


# -- optimizers of their own ---------------------------------------------------------------


def layer_norm(x: tf.Tensor, name: str) -> tf.Tensor:
    with v1.variable_scope(name):
        gamma = v1.get_variable("gamma", [x.shape[-1]], x.dtype, v1.ones_initializer())
        beta = v1.get_variable("beta", [x.shape[-1]], x.dtype, v1.zeros_initializer())
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-6) * gamma + beta


def encoder(ids: tf.Tensor, layers: int) -> tf.Tensor:
    """Attention layers and a perceptron, with layer norm."""
    with v1.variable_scope("embeddings"):
        table = v1.get_variable("word_embeddings", [WORD_COUNT, 8], FLOAT)
    x = tf.nn.embedding_lookup(table, ids)
    for i in range(layers):
        with v1.variable_scope(f"layer_{i}"):
            query, key, value = (dense(x, 8, name) for name in ("query", "key", "value"))
            attention = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 8**0.5)
            x = layer_norm(x + tf.matmul(attention, value), "attention_layer_norm")
            x = layer_norm(
                x + dense(dense(x, 16, "intermediate", tf.nn.relu), 8, "output"), "norm"
            )
    return dense(x[:, 0], 8, "pooler", tf.tanh)


def warmed_up(rate: float, steps: int, warm_up: int) -> tf.Tensor:
    """A learning rate with warm-up and linear decay, which depend on global_step."""
    step = v1.train.get_or_create_global_step()
    falling = v1.train.polynomial_decay(tf.constant(rate, FLOAT), step, steps, 0.0, power=1.0)
    part = tf.cast(step, FLOAT) / warm_up
    return tf.where(step < warm_up, rate * part, falling)


def classifies_sentences(layers: int, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """BERT's run_classifier: tf.gradients, clipping, a custom optimizer, global_step by hand.

    No word occurs twice in a batch: the norm of a sparse gradient counts each of its rows, and
    only a reduction merges the rows of a word, so TensorFlow would clip by two different norms.
    """

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        loss = cross_entropy(labels, dense(encoder(features, layers), 3, "logits"))
        optimizer = make(warmed_up(0.02, 40, 5))
        variables = v1.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.5)
        step = v1.train.get_or_create_global_step()
        train_op = optimizer.apply_gradients(zip(gradients, variables), global_step=step)
        with tf.control_dependencies([train_op]):  # or the rate could belong to the next step
            return Spec(mode, loss=loss, train_op=step.assign(step + 1).op)

    return lambda training: training.train(model_fn, by_name.halves((words_once(), words(3))))


def lars(training: by_name.Training) -> None:
    data = numbers(6), words(3)

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        hidden = dense(features, 8, "hidden", tf.nn.relu)
        loss = cross_entropy(labels, dense(hidden, 3, "logits"))
        step = v1.train.get_global_step()
        return Spec(mode, loss=loss, train_op=Lars(0.02).minimize(loss, step))

    training.train(model_fn, by_name.halves(data))


# -- moving averages, tables, recurrent networks -----------------------------------------------

TAGS, WORDS = ["O", "NAME", "PLACE"], ["the", "a", "Ada", "Bath", "of", "Turing", "York", "in"]


def sentences(input_context: Any = None) -> tf.data.Dataset:
    """Padded batches of words and tags from a generator; this rank's rows of each."""

    def generate():
        random = np.random.RandomState(3)
        while True:
            length = random.randint(2, 6)
            chosen = random.randint(0, len(WORDS) + 1, length)  # some are out of vocabulary
            text = [[*WORDS, "unknown"][i] for i in chosen]
            yield (text, length), [TAGS[i % 3] for i in chosen]

    shapes = (([None], []), [None])
    types = ((tf.string, tf.int32), tf.string)
    padding = (("<pad>", 0), "O")
    dataset = tf.data.Dataset.from_generator(generate, types, shapes)
    dataset = dataset.padded_batch(ROWS, shapes, padding)
    local = by_name.rows_of(input_context, ROWS)
    return dataset.map(lambda *batch: tf.nest.map_structure(lambda t: t[local], batch))


def path_scores(scores: tf.Tensor, tags: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Log-likelihood of tags in a conditional random field: [rows]."""
    transitions = v1.get_variable("transitions", [3, 3], scores.dtype)
    mask = tf.sequence_mask(lengths, tf.shape(scores)[1], scores.dtype)
    unary = tf.reduce_sum(scores * tf.one_hot(tags, 3, dtype=scores.dtype), -1)
    pairs = tf.gather_nd(transitions, tf.stack([tags[:, :-1], tags[:, 1:]], -1))
    given = tf.reduce_sum(unary * mask, 1) + tf.reduce_sum(pairs * mask[:, 1:], 1)

    def forward(before: tf.Tensor, now: Any) -> tf.Tensor:
        score, valid = now
        after = tf.reduce_logsumexp(before[:, :, None] + transitions, 1) + score
        return tf.where(valid[:, None] > 0, after, before)

    steps = tf.transpose(scores, [1, 0, 2])[1:], tf.transpose(mask)[1:]
    alphas = tf.concat([scores[None, :, 0], tf.scan(forward, steps, scores[:, 0])], 0)
    return given - tf.reduce_logsumexp(alphas[-1], -1)


def tf_ner(training: by_name.Training) -> None:
    """tf_ner's LSTM-CRF: tables, padded sentences, averages of all variables, metrics."""

    def model_fn(features: Any, labels: tf.Tensor, mode: str) -> Any:
        text, lengths = features
        vocabulary = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(WORDS, list(range(len(WORDS)))), len(WORDS)
        )
        tags = tf.lookup.StaticVocabularyTable(
            tf.lookup.KeyValueTensorInitializer(TAGS, np.arange(3)), 1
        ).lookup(labels)
        table = v1.get_variable("words", [len(WORDS) + 1, 6], FLOAT)
        x = tf.nn.embedding_lookup(table, vocabulary.lookup(text))
        cell = v1.nn.rnn_cell.LSTMCell(5, dtype=FLOAT)
        x, _ = v1.nn.dynamic_rnn(cell, x, lengths, dtype=FLOAT)
        scores = dense(x, 3, "scores")
        loss = tf.reduce_mean(-path_scores(scores, tags, lengths))
        mask = tf.sequence_mask(lengths, tf.shape(text)[1])
        metrics = {"acc": v1.metrics.accuracy(tags, tf.argmax(scores, -1), mask)}
        for name, (value, _) in metrics.items():
            v1.summary.scalar(name, value)
        step = v1.train.get_or_create_global_step()
        train_op = v1.train.AdamOptimizer(0.01).minimize(loss, step)
        average = tf.train.ExponentialMovingAverage(0.9)
        with tf.control_dependencies([train_op, *(update for _, update in metrics.values())]):
            train_op = average.apply(v1.trainable_variables())
        return Spec(mode, loss=loss, train_op=train_op)

    training.train(model_fn, sentences, save_summary_steps=5)


def ema_100(training: by_name.Training) -> None:
    """Moving averages of 100 variables and 20 activations, whose means differ between ranks."""

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        x, means = features, []
        for i in range(50):
            x += 0.1 * dense(x, 4, f"layer_{i}", tf.tanh)
            means += [tf.reduce_mean(x, 0)] * (i < 20)
        loss = tf.reduce_mean((tf.reduce_sum(x, 1) - labels) ** 2)
        step = v1.train.get_global_step()
        train_op = v1.train.MomentumOptimizer(0.001, 0.9).minimize(loss, step)
        average = tf.train.ExponentialMovingAverage(0.9, step)
        with tf.control_dependencies([train_op]):
            return Spec(
                mode,
                loss=loss,
                train_op=average.apply([*v1.trainable_variables(), *means]),
            )

    training.train(model_fn, by_name.halves((numbers(4), numbers())))


# -- slim ----------------------------------------------------------------------------------


def mirrored(x: np.ndarray) -> np.ndarray:
    """Makes the second half of each batch the first half, mirrored at its mean.

    Then both halves and the full batch have the same mean and variance of each feature, and batch
    normalisation of a local batch equals that of the full batch. The gradients still differ.
    """
    half = x[:, : ROWS // 2]
    return np.concatenate([half, 2 * half.mean(1, keepdims=True) - half], 1)


def batch_norm(x: tf.Tensor) -> tf.Tensor:
    """Batch normalisation of slim, without fused operations and without Keras."""
    with v1.variable_scope("BatchNorm"):
        shape, dtype = [x.shape[-1]], x.dtype
        beta = v1.get_variable("beta", shape, dtype, v1.zeros_initializer())
        gamma = v1.get_variable("gamma", shape, dtype, v1.ones_initializer())
        names = {"moving_mean": v1.zeros_initializer(), "moving_variance": v1.ones_initializer()}
        moving = [v1.get_variable(n, shape, dtype, i, trainable=False) for n, i in names.items()]
    mean, variance = tf.nn.moments(x, [0])
    for variable, value in zip(moving, (mean, variance)):
        update = moving_averages.assign_moving_average(variable, value, 0.9, zero_debias=False)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)


def create_train_op(total_loss: tf.Tensor, optimizer: Any, step: tf.Variable) -> tf.Tensor:
    """Equivalent of slim.learning.create_train_op."""
    updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(updates):
        barrier = tf.no_op(name="update_barrier")
    with tf.control_dependencies([barrier]):
        total_loss = tf.identity(total_loss)
    pairs = optimizer.compute_gradients(total_loss, v1.trainable_variables())
    updated = optimizer.apply_gradients(pairs, global_step=step)
    with tf.name_scope("train_op"):
        total_loss = tf.debugging.check_numerics(total_loss, "LossTensor is inf or nan")
    with tf.control_dependencies([updated]):
        train_op = tf.identity(total_loss)
    v1.add_to_collection(v1.GraphKeys.TRAIN_OP, train_op)
    return train_op


def slim(training: by_name.Training) -> None:
    """slim's training: create_train_op, BatchNorm, weight decay in a collection, Scaffold."""
    data = mirrored(numbers(6)), words(3)

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        hidden = dense(batch_norm(features), 8, "hidden", tf.nn.relu)
        v1.losses.add_loss(cross_entropy(labels, dense(hidden, 3, "logits")))
        for variable in v1.trainable_variables():
            if variable.op.name.endswith("kernel"):
                v1.losses.add_loss(
                    1e-3 * tf.nn.l2_loss(variable), v1.GraphKeys.REGULARIZATION_LOSSES
                )
        step = v1.train.get_global_step()
        average = tf.train.ExponentialMovingAverage(0.9, step)
        optimizer = v1.train.RMSPropOptimizer(0.01, momentum=0.5)
        loss = v1.losses.get_total_loss()
        with tf.control_dependencies([create_train_op(loss, optimizer, step)]):
            train_op = average.apply(v1.trainable_variables())
        scaffold = v1.train.Scaffold(saver=v1.train.Saver(max_to_keep=2))
        return Spec(mode, loss=loss, train_op=train_op, scaffold=scaffold)

    training.train(model_fn, by_name.halves(data))


# -- sparse gradients ------------------------------------------------------------------------


def deepfm(training: by_name.Training) -> None:
    """DeepFM: embeddings of single and of many ids, one of them partitioned; Adam."""
    lists = words(20, 4) * (RANDOM.rand(BATCHES, ROWS, 4) < 0.5)
    lists[1::2, ROWS // 2 :] = 0  # a rank without ids: its table gradient has no rows
    data = (
        {"user": words(9), "item": words(15).astype(np.int32), "history": lists, "x": numbers(3)},
        words(2).astype(np.float64),
    )

    def model_fn(features: Any, labels: tf.Tensor, mode: str) -> Any:
        history = tf.sparse.from_dense(features["history"])  # zeros are padding
        linear, fields = [], []
        for name, size in (("user", 9), ("item", 15), ("history", 20)):
            split = v1.fixed_size_partitioner(2) if name == "history" else None
            with v1.variable_scope(name, partitioner=split):
                tables = [v1.get_variable(f"embed_{k}", [size, k], FLOAT) for k in (1, 4)]
            if name == "history":
                first, vector = (
                    v1.nn.safe_embedding_lookup_sparse(
                        table, history, combiner="mean", partition_strategy="div"
                    )
                    for table in tables
                )
            else:
                first, vector = (tf.nn.embedding_lookup(t, features[name]) for t in tables)
            linear.append(first)
            fields.append(vector)
        stacked = tf.stack(fields, 1)
        products = tf.reduce_sum(stacked, 1) ** 2 - tf.reduce_sum(stacked**2, 1)
        deep = dense(tf.concat([*fields, features["x"]], 1), 8, "deep", tf.nn.relu)
        logits = tf.add_n([*linear, dense(deep, 1, "out")])[:, 0]
        logits += 0.5 * tf.reduce_sum(products, 1)
        each = tf.nn.embedding_lookup(v1.get_variable("each", [20], FLOAT), history.values)
        rows = history.indices[:, 0]
        logits += tf.math.unsorted_segment_sum(each, rows, tf.shape(logits)[0])
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(losses)
        train_op = v1.train.AdamOptimizer(0.01).minimize(loss, v1.train.get_global_step())
        return Spec(mode, loss=loss, train_op=train_op)

    training.train(model_fn, by_name.halves(data))


def wide_and_deep(training: by_name.Training, canned: Any, **optimizers: Any) -> None:
    """A canned model with crossed columns, hashed and listed words, buckets and embeddings."""
    column = tf.feature_column
    job = column.categorical_column_with_vocabulary_list("job", ["cook", "clerk", "smith"])
    town = column.categorical_column_with_hash_bucket("town", 20)
    age = column.numeric_column("age")
    ages = column.bucketized_column(age, [-0.5, 0.0, 0.5])
    estimator = canned(
        linear_feature_columns=[job, town, column.crossed_column([ages, "job", "town"], 50)],
        dnn_feature_columns=[age, column.indicator_column(job), column.embedding_column(town, 4)],
        dnn_hidden_units=[8],
        config=training.config(),
        **optimizers,
    )
    jobs = np.array(["cook", "clerk", "smith", "none"])[words(4)]
    towns = np.array(["Bath", "York", "Ely", "Wells", "Ripon"])[words(5)]
    features = {"job": jobs, "town": towns, "age": numbers(dtype=np.float32)}
    training.train(estimator.model_fn, by_name.halves((features, words(2))))


def wide_deep(training: by_name.Training) -> None:
    wide_and_deep(training, tf.estimator.DNNLinearCombinedClassifier)


def wide_deep_v1(training: by_name.Training) -> None:
    """Wide & deep of models/r1: optimizers of TensorFlow 1, and a loss that is a sum."""
    wide_and_deep(
        training,
        v1.estimator.DNNLinearCombinedClassifier,
        linear_optimizer=v1.train.FtrlOptimizer(0.05, l1_regularization_strength=0.01),
        dnn_optimizer=v1.train.AdagradOptimizer(0.05),
    )


def deepctr(training: by_name.Training) -> None:
    """DeepCTR's head: the loss is a sum, but the losses in metrics are means."""

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        losses, logits = v1.losses, dense(features, 1, "logits")
        each = losses.sigmoid_cross_entropy(labels, logits, reduction=losses.Reduction.NONE)
        loss = losses.compute_weighted_loss(each, reduction=losses.Reduction.SUM)
        losses.compute_weighted_loss(each, reduction=losses.Reduction.MEAN)
        optimizer = v1.train.GradientDescentOptimizer(0.01)
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
        return Spec(mode, loss=loss, train_op=train_op)

    training.train(model_fn, by_name.halves((numbers(6), words(2, 1))))


# -- several heads, tapes, stops, tensors as input ---------------------------------------------


def tensors(input_fn: Callable[..., tf.data.Dataset]) -> Callable[..., Any]:
    """An input_fn that returns tensors, as in TensorFlow 1."""

    def made(input_context: Any = None) -> Any:
        return v1.data.make_one_shot_iterator(input_fn(input_context)).get_next()

    return made


def ranking(training: by_name.Training) -> None:
    """TF-Ranking: two heads, each with its loss; exports during training."""
    heads = [tf.estimator.RegressionHead(name="score"), tf.estimator.BinaryClassHead(name="click")]
    head = tf.estimator.MultiHead(heads, [1.0, 0.5])
    labels = {"score": numbers(1, dtype=np.float32), "click": words(2, 1)}

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        hidden = dense(features["x"], 8, "hidden", tf.nn.relu)
        logits = {name: dense(hidden, 1, name) for name in ("score", "click")}
        step = v1.train.get_global_step()
        optimizer = v1.train.AdagradOptimizer(0.1)
        return head.create_estimator_spec(
            features, mode, logits, labels, train_op_fn=lambda loss: optimizer.minimize(loss, step)
        )

    def receiver() -> Any:
        x = v1.placeholder(tf.float32, [None, 6])
        return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    input_fn = tensors(by_name.halves(({"x": numbers(6, dtype=np.float32)}, labels)))
    exporter = tf.estimator.LatestExporter("latest", receiver)
    api = tf.estimator if training.strategy is None else estimator_ext
    api.train_and_evaluate(
        training.estimator(model_fn),
        tf.estimator.TrainSpec(input_fn, training.steps, [training.outcome]),
        tf.estimator.EvalSpec(input_fn, 2, exporters=exporter, start_delay_secs=0),
    )


def tape(training: by_name.Training) -> None:
    """Gradients of a tape; the loss is divided as in the guides for strategies."""

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        with tf.GradientTape() as recorded:
            logits = dense(dense(features, 8, "hidden", tf.nn.relu), 3, "logits")
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.nn.compute_average_loss(losses)
        variables = v1.trainable_variables()
        pairs = zip(recorded.gradient(loss, variables), variables)
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.apply_gradients(pairs, v1.train.get_global_step())
        return Spec(mode, loss=loss, train_op=train_op)

    training.train(model_fn, by_name.halves((numbers(6), words(3))))


def classifier(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    loss = cross_entropy(labels, dense(dense(features, 8, "hidden", tf.nn.relu), 3, "logits"))
    optimizer = v1.train.AdamOptimizer(0.01)
    return Spec(mode, loss=loss, train_op=optimizer.minimize(loss, v1.train.get_global_step()))


def early_stopping(training: by_name.Training) -> None:
    """Stock hooks with their defaults, which do not stop the training."""
    experimental = tf.estimator.experimental
    estimator = training.estimator(classifier)
    hooks = [
        experimental.stop_if_no_decrease_hook(estimator, "loss", 1000),
        experimental.stop_if_higher_hook(estimator, "accuracy", 2.0),
        training.outcome,
    ]
    estimator.train(by_name.halves((numbers(6), words(3))), hooks, max_steps=training.steps)


def early_stop(training: by_name.Training) -> None:
    """A stock hook with its defaults that stops the training at its first check."""
    estimator = training.estimator(classifier)
    hook = tf.estimator.experimental.make_early_stopping_hook(estimator, lambda: True)
    input_fn = by_name.halves((numbers(6), words(3)))
    estimator.train(input_fn, [hook, training.outcome], max_steps=training.steps)


def horovod_mnist(training: by_name.Training) -> None:
    """Horovod's example: a convolutional network, numpy_input_fn, a LoggingTensorHook."""
    images, labels = numbers(8, 8, 1, dtype=np.float32), words(10).astype(np.int32)

    def model_fn(features: Any, labels: tf.Tensor, mode: str) -> Any:
        x = v1.layers.conv2d(features["x"], 4, 3, activation=tf.nn.relu)
        x = v1.layers.flatten(v1.layers.max_pooling2d(x, 2, 2))
        logits = v1.layers.dense(x, 10)
        tf.nn.softmax(logits, name="softmax_tensor")
        loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
        optimizer = v1.train.MomentumOptimizer(0.01, 0.9)
        train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
        return Spec(mode, loss=loss, train_op=train_op)

    def input_fn(input_context: Any = None) -> Any:
        local = by_name.rows_of(input_context, ROWS)
        x, y = (array[:, local].reshape(-1, *array.shape[2:]) for array in (images, labels))
        batch_size = len(x) // BATCHES
        read = v1.estimator.inputs.numpy_input_fn({"x": x}, y, batch_size, None, shuffle=False)
        return read()

    log = v1.train.LoggingTensorHook({"probabilities": "softmax_tensor"}, every_n_iter=50)
    estimator = training.estimator(model_fn)
    estimator.train(input_fn, hooks=[log, training.outcome], max_steps=training.steps)


MODELS = {
    "bert": classifies_sentences(3, lambda rate: AdamWeightDecay(rate, exclude=["norm", "bias"])),
    "lamb": classifies_sentences(1, lambda rate: Lamb(rate, exclude=["norm", "bias"])),
    "lars": lars,
    "tf_ner": tf_ner,
    "ema_100": ema_100,
    "slim": slim,
    "deepctr": deepctr,
    "deepfm": deepfm,
    "wide_deep": wide_deep,
    "wide_deep_v1": wide_deep_v1,
    "ranking": ranking,
    "tape": tape,
    "early_stopping": early_stopping,
    "early_stop": early_stop,
    "horovod_mnist": horovod_mnist,
}


def with_same_data(model: Callable[[Any], None]) -> Callable[[Any], None]:
    """Trains a model with data that do not depend on earlier models."""

    def train(training: by_name.Training) -> None:
        RANDOM.seed(0)
        model(training)

    return train


if __name__ == "__main__":
    by_name.train_all({name: with_same_data(model) for name, model in MODELS.items()})
