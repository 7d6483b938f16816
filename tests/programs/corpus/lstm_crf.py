"""Names of persons and places: fused LSTMs and a CRF, lookup tables, averages; TensorFlow 1."""

import functools
import pathlib

import numpy as np
import tensorflow as tf
from arguments import read_arguments

args = read_arguments(data={"type": pathlib.Path}, averages={"action": "store_true"})


def sentences(name):
    for lines in (args.data / f"{name}.txt").read_text().strip().split("\n\n"):
        words, tags = zip(*(line.split() for line in lines.split("\n")))
        yield (words, len(words)), tags


def input_fn(name):
    types = (tf.string, tf.int32), tf.string
    shapes = ([None], ()), [None]
    data = tf.data.Dataset.from_generator(functools.partial(sentences, name), types, shapes)
    if name == "train":
        data = data.shuffle(1000, seed=3).repeat()
    return data.padded_batch(args.batch_size, shapes, (("<pad>", 0), "O")).prefetch(1)


def serving_input_fn():
    words = tf.placeholder(tf.string, [None, None], "words")
    lengths = tf.placeholder(tf.int32, [None], "lengths")
    received = {"words": words, "lengths": lengths}
    return tf.estimator.export.ServingInputReceiver(received, received)


def network(words, lengths, tags, getter=None):
    with tf.variable_scope("network", reuse=getter is not None, custom_getter=getter):
        pretrained = np.random.RandomState(1).normal(size=[64, 16])
        table = tf.get_variable(
            "words", dtype=tf.float32, initializer=pretrained.astype(np.float32), trainable=False
        )
        inputs = tf.transpose(tf.nn.embedding_lookup(table, words), [1, 0, 2])
        inputs = tf.layers.dropout(inputs, 0.0, training=True)
        forward = tf.contrib.rnn.LSTMBlockFusedCell(8, name="forward")
        backward = tf.contrib.rnn.LSTMBlockFusedCell(8, name="backward")
        backward = tf.contrib.rnn.TimeReversedFusedRNN(backward)
        outputs = [
            cell(inputs, dtype=tf.float32, sequence_length=lengths)[0]
            for cell in (forward, backward)
        ]
        logits = tf.layers.dense(tf.transpose(tf.concat(outputs, -1), [1, 0, 2]), tags)
        return logits, tf.get_variable("crf", [tags, tags])


def model_fn(features, labels, mode):
    if isinstance(features, dict):
        features = features["words"], features["lengths"]
    words, lengths = features
    tags = (args.data / "tags.txt").read_text().split()
    vocabulary = tf.contrib.lookup.index_table_from_file(
        str(args.data / "words.txt"), num_oov_buckets=1
    )
    logits, transitions = network(vocabulary.lookup(words), lengths, len(tags))
    averages = tf.train.ExponentialMovingAverage(0.9)

    def averaged(getter, name, *rest, **options):
        variable = getter(name, *rest, **options)
        average = averages.average(variable)
        return variable if average is None else average

    if args.averages:
        update = averages.apply(tf.trainable_variables())
        if mode != tf.estimator.ModeKeys.TRAIN:
            logits, transitions = network(
                vocabulary.lookup(words),
                lengths,
                len(tags),
                averaged,
            )
    predicted, _ = tf.contrib.crf.crf_decode(logits, transitions, lengths)
    if mode == tf.estimator.ModeKeys.PREDICT:
        names = tf.contrib.lookup.index_to_string_table_from_file(str(args.data / "tags.txt"))
        predictions = {"tags": names.lookup(tf.to_int64(predicted))}
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    table = tf.contrib.lookup.index_table_from_file(str(args.data / "tags.txt"))
    ids = table.lookup(labels)
    likelihood, _ = tf.contrib.crf.crf_log_likelihood(logits, ids, lengths, transitions)
    loss = tf.reduce_mean(-likelihood)
    weights = tf.sequence_mask(lengths)
    metrics = {"accuracy": tf.metrics.accuracy(ids, predicted, weights)}
    for name, (_, value) in metrics.items():
        tf.summary.scalar(name, value)
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    train_op = tf.train.AdamOptimizer(0.02).minimize(loss, tf.train.get_global_step())
    if args.averages:
        train_op = tf.group(train_op, update)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


config = tf.estimator.RunConfig(model_dir=args.model_dir, save_checkpoints_steps=10)
estimator = tf.estimator.Estimator(model_fn, args.model_dir, config)
pathlib.Path(estimator.eval_dir()).mkdir(parents=True, exist_ok=True)
hook = tf.contrib.estimator.stop_if_no_increase_hook(estimator, "accuracy", 500, min_steps=800)
tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(lambda: input_fn("train"), args.steps, [hook]),
    tf.estimator.EvalSpec(lambda: input_fn("dev"), throttle_secs=0),
)
print("PREDICTED", len(list(estimator.predict(lambda: input_fn("test")))))
exported = estimator.export_savedmodel(f"{args.model_dir}/export", serving_input_fn)
predict = tf.contrib.predictor.from_saved_model(exported.decode())
print("TAGS", predict({"words": [["ann", "went"]], "lengths": [2]})["tags"][0])
