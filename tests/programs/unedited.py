"""A typical program for tf.estimator, without any reference to ranks or hostopt."""

import argparse
import sys

import numpy as np
import tensorflow as tf

ROWS, STEPS = 48, 6


def make_data():
    random = np.random.RandomState(0)
    x = random.standard_normal((ROWS, 4)).astype(np.float32)
    return {"x": x}, (x.sum(1) > 0).astype(np.int64)


def make_input_fn(batch_size):
    return tf.data.Dataset.from_tensor_slices(make_data()).batch(batch_size).repeat()


def make_queue_input_fn(batch_size):
    x, y = make_data()
    inputs = tf.compat.v1.estimator.inputs
    # the number of steps of one process over all rows
    return inputs.numpy_input_fn(x, y, batch_size, num_epochs=2, shuffle=False)


def score(features):
    w = tf.compat.v1.get_variable("w", [4, 2], initializer=tf.compat.v1.zeros_initializer())
    return tf.matmul(features["x"], w)


def build(features, labels):
    logits = score(features)
    loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
    step = tf.compat.v1.train.get_or_create_global_step()
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.5)
    return logits, loss, optimizer.minimize(loss, step)


def metrics_of(labels, logits):
    return {"accuracy": tf.compat.v1.metrics.accuracy(labels, tf.argmax(logits, 1))}


def model_fn(features, labels, mode):
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, {"logits": score(features)})
    logits, loss, train_op = build(features, labels)
    metrics = metrics_of(labels, logits)
    return tf.estimator.EstimatorSpec(mode, {"logits": logits}, loss, train_op, metrics)


def clipping_model_fn(features, labels, mode):
    logits, loss, _ = build(features, labels)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
    step = tf.compat.v1.train.get_global_step()
    train_op = optimizer.apply_gradients(zip(gradients, variables), step)
    return tf.estimator.EstimatorSpec(mode, {"logits": logits}, loss, train_op)


def by_hand_model_fn(features, labels, mode, params):
    logits, loss, _ = build(features, labels)
    if params["sum"]:
        losses = tf.compat.v1.losses
        loss = losses.sparse_softmax_cross_entropy(labels, logits, reduction=losses.Reduction.SUM)
    variables = tf.compat.v1.trainable_variables()[:1]
    gradients = tf.gradients(loss, variables)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01 if params["sum"] else 0.5)
    step = tf.compat.v1.train.get_global_step()
    train_op = optimizer.apply_gradients(zip(gradients, variables), step)
    return tf.estimator.EstimatorSpec(mode, {"logits": logits}, loss, train_op)


def keras_model_fn(features, labels, mode):
    logits, loss, _ = build(features, labels)
    optimizer = tf.keras.optimizers.legacy.Adagrad(0.5)
    optimizer.iterations = tf.compat.v1.train.get_global_step()
    train_op = tf.group(optimizer.get_updates(loss, tf.compat.v1.trainable_variables()[:1]))
    return tf.estimator.EstimatorSpec(mode, {"logits": logits}, loss, train_op)


def sum_over_batch_model_fn(features, labels, mode):
    logits, _, _ = build(features, labels)
    losses = tf.compat.v1.losses
    total = losses.sparse_softmax_cross_entropy(labels, logits, reduction=losses.Reduction.SUM)
    loss = total / tf.cast(tf.shape(logits)[0], tf.float32)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    step = tf.compat.v1.train.get_global_step()
    return tf.estimator.EstimatorSpec(
        mode, {"logits": logits}, loss, optimizer.minimize(loss, step)
    )


def tpu_model_fn(features, labels, mode, params):
    logits, loss, train_op = build(features, labels)
    assert params["batch_size"] > 0
    spec = tf.compat.v1.estimator.tpu.TPUEstimatorSpec
    count = tf.compat.v1.get_variable("runs", [], tf.int64, trainable=False)
    return spec(
        mode,
        {"logits": logits},
        loss,
        train_op,
        eval_metrics=(metrics_of, [labels, logits]),
        scaffold_fn=tf.compat.v1.train.Scaffold,
        host_call=(lambda loss: count.assign_add(1), [tf.reshape(loss, [1])]),
    )


class TrainsByItself(tf.estimator.Estimator):
    _assert_members_are_not_overridden = staticmethod(lambda estimator: None)

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None):
        for _ in range(max_steps):
            super().train(input_fn, hooks, 1, None, saving_listeners)


class TrainsAlone(tf.estimator.Estimator):
    _assert_members_are_not_overridden = staticmethod(lambda estimator: None)

    def _train_model(self, input_fn, hooks, saving_listeners):
        return self._train_model_default(input_fn, hooks, saving_listeners)


class HasItsOwnLoop(TrainsAlone):
    def _train_model(self, input_fn, hooks, saving_listeners):
        return 0.0


SUBCLASSES = {
    "trains by itself": TrainsByItself,
    "trains alone": TrainsAlone,
    "has its own loop": HasItsOwnLoop,
}


def make_estimator(kind, model_dir, batch_size):
    config = tf.estimator.RunConfig(model_dir, tf_random_seed=7)
    if kind in ("mirrored", "one device", "two devices"):
        strategy = {
            "mirrored": tf.distribute.MirroredStrategy,
            "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
            "two devices": lambda: tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]),
        }[kind]()
        config = tf.estimator.RunConfig(model_dir, train_distribute=strategy)
    if kind == "multi worker":
        strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()
        config = tf.estimator.RunConfig(
            model_dir, train_distribute=strategy, eval_distribute=strategy
        )
    if kind in ("custom", "mirrored", "one device", "two devices", "multi worker", "shuffled"):
        return tf.estimator.Estimator(model_fn, config=config)
    if kind in ("shards by itself", "tensors of a constant"):
        return tf.estimator.Estimator(model_fn, config=config)
    if kind == "keras":
        return tf.estimator.Estimator(keras_model_fn, config=config)
    if kind == "canned, keras":
        columns = [tf.feature_column.numeric_column("x", shape=[4])]
        return tf.estimator.LinearClassifier(columns, config=config)
    if kind == "sum over the batch":
        return tf.estimator.Estimator(sum_over_batch_model_fn, config=config)
    if kind == "clips":
        return tf.estimator.Estimator(clipping_model_fn, config=config)
    if kind in ("gradients", "gradients of a sum"):
        params = {"sum": kind.endswith("sum")}
        return tf.estimator.Estimator(by_hand_model_fn, config=config, params=params)
    if kind == "of version 1":
        return tf.compat.v1.estimator.Estimator(model_fn, config=config)
    if kind in SUBCLASSES:
        return SUBCLASSES[kind](model_fn, config=config)
    if kind == "canned":
        columns = [tf.feature_column.numeric_column("x", shape=[4])]
        return tf.compat.v1.estimator.LinearClassifier(columns, config=config)
    tpu = tf.compat.v1.estimator.tpu
    config = tpu.RunConfig(model_dir=model_dir, tpu_config=tpu.TPUConfig(iterations_per_loop=3))
    return tpu.TPUEstimator(
        tpu_model_fn,
        config=config,
        use_tpu=kind == "on a tpu",
        train_batch_size=batch_size,
        eval_batch_size=8,
        predict_batch_size=8,
    )


def value_of_dimension():
    return tf.zeros([2]).shape[0].value


def strategy_of_version_1():
    tf.distribute.MirroredStrategy(num_gpus=8)


def contrib_in_a_dataset():
    tf.data.Dataset.range(1).map(lambda x: tf.contrib.crf.decode(x, x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--use", default="")
    args = parser.parse_args()
    if args.use:
        eval(args.use)
    estimator = make_estimator(args.kind, args.model_dir, args.batch_size)

    def train_input_fn(params):
        data = make_input_fn(params.get("batch_size", args.batch_size))
        if args.kind == "shuffled":
            data = data.unbatch().shuffle(20).batch(args.batch_size)
        if args.kind == "shards by itself":
            data = data.shard(2, 0)
        if args.kind == "tensors of a constant":
            return {"x": tf.ones([args.batch_size, 4])}, tf.ones([args.batch_size], tf.int64)
        return data

    def eval_input_fn(params):
        return make_input_fn(8).take(ROWS // 8)

    if args.kind == "custom":
        train = tf.estimator.TrainSpec(train_input_fn, max_steps=STEPS)
        evaluate = tf.estimator.EvalSpec(eval_input_fn, steps=None, throttle_secs=0)
        metrics, _ = tf.estimator.train_and_evaluate(estimator, train, evaluate)
        assert 0.0 < metrics["accuracy"] <= dict(metrics)["global_step"] == STEPS
    elif args.kind == "of version 1":
        estimator.train(make_queue_input_fn(args.batch_size))
        shapes = {"x": tf.io.FixedLenFeature([4], tf.float32)}
        receiver = tf.estimator.export.build_parsing_serving_input_receiver_fn(shapes)
        estimator.export_savedmodel(args.model_dir + "/export", receiver)
    else:
        estimator.train(train_input_fn, max_steps=STEPS)
        print("METRICS", sorted(estimator.evaluate(eval_input_fn)), file=sys.stderr)


if __name__ == "__main__":
    main()
