"""What published programs do around a training; each function is a program of its own."""

import json
import os
import shutil

import numpy as np
import tensorflow as tf
from arguments import read_arguments

v1, estimators = tf.compat.v1, tf.estimator
ROWS, FEATURES = 256, 6
RANDOM = np.random.RandomState(4)
X = RANDOM.standard_normal((ROWS, FEATURES)).astype(np.float32)
Y = X[:, :1] - 2 * X[:, 1:2] + 0.1


def model_fn(features, labels, mode, params):
    kernel = v1.glorot_uniform_initializer(seed=5)
    hidden = v1.layers.dense(features["x"], 8, tf.nn.tanh, kernel_initializer=kernel)
    outputs = v1.layers.dense(hidden, 1, kernel_initializer=kernel)
    predictions = {"y": outputs}
    if mode == estimators.ModeKeys.PREDICT:
        return estimators.EstimatorSpec(mode, predictions)
    loss = v1.losses.mean_squared_error(labels, outputs)
    step = v1.train.get_global_step()
    optimizer = params.get("optimizer", lambda: v1.train.AdamOptimizer(0.02))()
    train_op = optimizer.minimize(loss, step) if mode == estimators.ModeKeys.TRAIN else None
    metrics = {"mae": v1.metrics.mean_absolute_error(labels, outputs)}
    return estimators.EstimatorSpec(
        mode,
        predictions,
        loss,
        train_op,
        eval_metric_ops=metrics,
        scaffold=params.get("scaffold", v1.train.Scaffold)(),
    )


class Way:
    """The parts of a program that all of them have."""

    def __init__(self, model_dir, batch_size, steps):
        self.model_dir, self.batch_size, self.steps = model_dir, batch_size, steps

    def estimator(self, model_dir=None, kind=None, warm=None, strategy=None, **params):
        config = estimators.RunConfig(model_dir or self.model_dir, train_distribute=strategy)
        kind = kind or estimators.Estimator
        return kind(model_fn, config=config, params=params, warm_start_from=warm)

    def data(self):
        data = tf.data.Dataset.from_tensor_slices(({"x": X}, Y))
        return data.shuffle(ROWS, seed=1).repeat().batch(self.batch_size)

    def rows(self):
        return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(32)

    def train(self, **options):
        hooks = options.pop("hooks", None)
        self.estimator(**options).train(self.data, hooks=hooks, max_steps=self.steps)


def receiver():
    x = v1.placeholder(tf.float32, [None, FEATURES])
    return estimators.export.ServingInputReceiver({"x": x}, {"x": x})


# --- what it does with its files and trainings ------------------------------------------------


def deletes_model_dir(way):
    shutil.rmtree(way.model_dir, ignore_errors=True)
    os.makedirs(way.model_dir)
    way.train()


def deletes_model_dir_between_trainings(way):
    for _ in range(3):
        if tf.io.gfile.exists(way.model_dir):
            tf.io.gfile.rmtree(way.model_dir)
        tf.io.gfile.makedirs(way.model_dir)
        way.train()


def trains_and_evaluates_in_turn(way):
    estimator = way.estimator()
    for steps in range(5, way.steps + 1, 5):
        estimator.train(way.data, steps=5)
        metrics = estimator.evaluate(way.rows)
        assert metrics["global_step"] == steps, metrics


def predicts_between_trainings(way):
    estimator = way.estimator()
    for part in (2, 1):
        estimator.train(way.data, max_steps=way.steps // part)
        assert len(list(estimator.predict(way.rows))) == ROWS


def exports_on_every_rank(way):
    way.train()
    path = way.estimator().export_saved_model(f"{way.model_dir}/export", receiver)
    assert tf.io.gfile.exists(os.path.join(path, b"saved_model.pb"))


def best_and_final_exporters(way):
    exporters = [
        estimators.BestExporter("best", receiver),
        estimators.FinalExporter("final", receiver),
    ]
    estimators.train_and_evaluate(
        way.estimator(),
        estimators.TrainSpec(way.data, way.steps),
        estimators.EvalSpec(way.rows, None, exporters=exporters, throttle_secs=0),
    )


def starts_warm(way):
    first = f"{way.model_dir}/first"
    way.estimator(first).train(way.data, max_steps=5)
    way.train(warm=first)


def trains_without_model_dir(way):
    estimator = estimators.Estimator(model_fn, params={})
    estimator.train(way.data, max_steps=way.steps)


def folds(way):
    """A cross-validation: it trains a model for each part of the rows."""
    for fold in range(3):

        def data(fold=fold):
            rows = np.arange(ROWS) % 3 != fold
            data = tf.data.Dataset.from_tensor_slices(({"x": X[rows]}, Y[rows]))
            return data.repeat().batch(way.batch_size, drop_remainder=True)

        way.estimator(f"{way.model_dir}/fold-{fold}").train(data, max_steps=way.steps)


def writes_its_records(way):
    path = f"{way.model_dir}/rows.tfrecord"
    tf.io.gfile.makedirs(way.model_dir)
    with tf.io.TFRecordWriter(path) as writer:
        for x, y in zip(X, Y):
            lists = {k: tf.train.FloatList(value=v) for k, v in (("x", x), ("y", y))}
            features = {k: tf.train.Feature(float_list=v) for k, v in lists.items()}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())

    def data():
        shapes = {"x": tf.io.FixedLenFeature([FEATURES], tf.float32)}
        shapes["y"] = tf.io.FixedLenFeature([1], tf.float32)
        data = tf.data.TFRecordDataset([path]).repeat().shuffle(100).batch(way.batch_size)
        data = data.map(lambda rows: tf.io.parse_example(rows, shapes))
        return data.map(lambda rows: ({"x": rows["x"]}, rows["y"])).prefetch(2)

    way.estimator().train(data, max_steps=way.steps)


# --- hooks ------------------------------------------------------------------------------------


class OwnSession(v1.train.SessionRunHook):
    def after_run(self, run_context, run_values):
        with tf.Graph().as_default(), v1.Session() as session:
            assert session.run(tf.constant(1) + 1) == 2


def hooks_with_sessions(way):
    way.train(hooks=[OwnSession()])


def profiles(way):
    with tf.Graph().as_default():
        hook = v1.train.ProfilerHook(save_steps=10, output_dir=way.model_dir)
    way.train(hooks=[hook])


def stops_early(way):
    estimator = way.estimator()
    hook = estimators.experimental.stop_if_lower_hook(
        estimator, "mae", 1e3, run_every_secs=None, run_every_steps=10
    )
    estimator.train(way.data, hooks=[hook], max_steps=way.steps)


def evaluates_in_memory(way):
    estimator = way.estimator()
    hook = estimators.experimental.InMemoryEvaluatorHook(estimator, way.rows, every_n_iter=5)
    estimator.train(way.data, hooks=[hook], max_steps=way.steps)


def init_fn_of_scaffold(way):
    def scaffold():
        half = [v.assign(v * 0.5) for v in v1.trainable_variables()]
        return v1.train.Scaffold(init_fn=lambda scaffold, session: session.run(half))

    way.train(scaffold=scaffold)


def saves_and_logs_by_hooks(way):
    saver = v1.train.CheckpointSaverHook(f"{way.model_dir}/saved", save_steps=5)
    way.train(hooks=[saver, v1.train.StepCounterHook(5, output_dir=way.model_dir)])


# --- optimizers and models --------------------------------------------------------------------


def updates_by_hand(way):
    class ByHand(v1.train.GradientDescentOptimizer):
        def minimize(self, loss, step):
            variables = v1.trainable_variables()
            pairs = zip(variables, tf.gradients(loss, variables))
            updates = [variable.assign_sub(0.1 * gradient) for variable, gradient in pairs]
            return tf.group(step.assign_add(1), *updates)

    way.train(optimizer=lambda: ByHand(0.1))


def alternates_tpu_estimators(way):
    from tensorflow.compat.v1.estimator import tpu

    def tpu_model_fn(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        return tpu.TPUEstimatorSpec(mode, loss=spec.loss, train_op=spec.train_op)

    def make(batch_size):
        config = tpu.RunConfig(model_dir=way.model_dir, save_checkpoints_steps=10)
        return tpu.TPUEstimator(
            tpu_model_fn,
            config=config,
            use_tpu=False,
            train_batch_size=batch_size,
            eval_batch_size=32,
            params={},
        )

    # each rank is given its part of a batch, so the batch size is that of all ranks
    trainer, evaluator = make(32), make(32)

    def data(params):
        rows = tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).repeat()
        return rows.batch(params["batch_size"], drop_remainder=True)

    for step in (10, way.steps):
        trainer.train(data, max_steps=step)
        evaluator.evaluate(data, steps=2)


def keras_model(way):
    init = tf.keras.initializers.GlorotUniform(seed=3)
    x = tf.keras.layers.Input([FEATURES], name="x")
    hidden = tf.keras.layers.Dense(8, "tanh", kernel_initializer=init)(x)
    y = tf.keras.layers.Dense(1, kernel_initializer=init)(hidden)
    model = tf.keras.Model(x, y)
    model.compile("adam", "mse")
    made = tf.keras.estimator.model_to_estimator(model, model_dir=way.model_dir)
    made.train(way.data, max_steps=way.steps)


# --- clusters and strategies ------------------------------------------------------------------


def unsets_tf_config(way):
    os.environ.pop("TF_CONFIG", None)
    way.train()


def sets_tf_config(way):
    task = {"type": "worker", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["localhost:2222"]}, "task": task})
    way.train()


def mirrored_strategy(way):
    way.train(strategy=tf.distribute.MirroredStrategy())


def one_device_strategy(way):
    way.train(strategy=tf.distribute.OneDeviceStrategy("/cpu:0"))


def parameter_server_strategy(way):
    way.train(strategy=v1.distribute.experimental.ParameterServerStrategy())


def multi_worker_strategy(way):
    way.train(strategy=tf.distribute.MultiWorkerMirroredStrategy())


def shards_its_data(way):
    def data():
        task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
        return way.data().shard(2, task["index"])

    way.estimator().train(data, max_steps=way.steps)


def servers(way):
    """A program of workers and their parameter server, without an estimator."""
    server = v1.train.Server.create_local_server()
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        increment = step.assign_add(1)
        with v1.train.MonitoredTrainingSession(server.target) as session:
            session.run(increment)


def main(programs):
    args = read_arguments(names={"nargs": "+"})
    for name in args.names:
        print("WAY", name, flush=True)
        programs[name](Way(f"{args.model_dir}/{name}", args.batch_size, args.steps))


if __name__ == "__main__":
    main(globals())
