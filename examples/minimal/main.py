"""Trains and evaluates a small classifier on one or more ranks, on data generated with NumPy.

python examples/minimal/main.py --model-dir model
hostopt run -np 2 -- python examples/minimal/main.py --model-dir model
"""

import argparse

import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()  # restores tf.estimator, which TensorFlow 2.16 removed


def make_data(seed, rows):
    """Returns points, float32 [rows, 20], and their classes, int64 [rows]: 1 if the sum is > 0."""
    x = np.random.default_rng(seed).normal(size=[rows, 20]).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int64)


def input_fn(input_context=None):
    # each rank reads its own shard of the data, in batches of its own size
    context = input_context or tf.distribute.InputContext()
    dataset = tf.data.Dataset.from_tensor_slices(make_data(seed=1, rows=4096))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(1024).repeat().batch(64)


def eval_input_fn():
    return tf.data.Dataset.from_tensor_slices(make_data(seed=2, rows=1000)).batch(100)


def model_fn(features, labels, mode):
    hidden = tf.keras.layers.Dense(32, activation="relu")(features)
    logits = tf.keras.layers.Dense(2)(hidden)
    # the mean over the local batch; the framework averages gradients over the ranks
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
    if mode == tf.estimator.ModeKeys.EVAL:
        accuracy = tf.compat.v1.metrics.accuracy(labels, tf.argmax(logits, axis=1))
        return estimator_ext.EstimatorSpec(
            mode=mode, loss=loss, eval_metric_ops={"accuracy": accuracy}
        )

    optimizer = tf.compat.v1.train.AdamOptimizer(0.01)
    variables = tf.compat.v1.trainable_variables()
    gradients = [g for g, _ in optimizer.compute_gradients(loss, var_list=variables)]

    # The accelerator computes the loss and the gradients; the host does the rest. host_call is a
    # function and the tensors to copy to the host for it. Here apply_gradients averages the
    # gradients over all ranks and updates the variables, which live on the host with Adam's slots.
    def update(*host_gradients):
        return optimizer.apply_gradients(zip(host_gradients, variables))

    return estimator_ext.EstimatorSpec(
        mode=mode, loss=loss, train_op=tf.identity(loss), host_call=(update, gradients)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", default="./minimal_model", help="checkpoints and logs")
    parser.add_argument("--steps", type=int, default=200, help="global step at which to stop")
    args = parser.parse_args()

    # without TF_CONFIG there is one rank; `hostopt run` sets TF_CONFIG for each process
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = estimator_ext.HostOffloadStrategy(cluster, variables_on_host=True)
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        session_config=tf.compat.v1.ConfigProto(allow_soft_placement=False),
    )
    classifier = estimator_ext.Estimator(model_fn, args.model_dir, config)
    metrics, _ = estimator_ext.train_and_evaluate(
        classifier,
        tf.estimator.TrainSpec(input_fn, max_steps=args.steps),
        tf.estimator.EvalSpec(eval_input_fn, steps=None, start_delay_secs=0, throttle_secs=5),
    )
    if metrics:  # the last evaluation: in the chief, or in the evaluator if there is one
        print(f"step {metrics['global_step']}: accuracy {metrics['accuracy']:.3f}", flush=True)


if __name__ == "__main__":
    main()
