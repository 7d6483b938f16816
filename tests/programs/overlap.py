"""Holds the last gradient back until the transport has sent bucket 1, in a real training step."""

from __future__ import annotations

import sys
import threading

import numpy as np
import tensorflow as tf

import estimator_ext

STEPS, DEADLINE_S = 3, 20.0


def main(model_dir: str) -> None:
    # three layers of 3.1 KiB each and buckets of half that size: one layer per bucket
    strategy = estimator_ext.HostOffloadStrategy(
        accelerator="/device:CPU:1",
        communication="grpc",
        bucket_mb=2048 / 2**20,
        collective_timeout_s=2 * DEADLINE_S,
    )
    transport = strategy.communicator.transport
    bucket_1_sent = threading.Semaphore(0)
    buckets = set()
    send = transport.send

    async def watched_send(peer, tag, *rest) -> None:
        await send(peer, tag, *rest)
        buckets.add(tag.bucket)
        if tag.bucket == 1 and tag.round == 0:
            bucket_1_sent.release()

    transport.send = watched_send

    def hold_back(gradient: np.ndarray) -> np.ndarray:
        if not bucket_1_sent.acquire(timeout=DEADLINE_S):
            raise RuntimeError("bucket 1 was not sent before the last gradient was there")
        return gradient

    @tf.custom_gradient
    def last_gradient_waits(x: tf.Tensor):
        def grad(upstream: tf.Tensor) -> tf.Tensor:
            with tf.device("/device:CPU:0"):
                held = tf.numpy_function(hold_back, [upstream], upstream.dtype)
            held.set_shape(upstream.shape)
            return held

        return tf.identity(x), grad

    def model_fn(features, labels, mode):
        kernels = [
            tf.compat.v1.get_variable(f"kernel_{i}", (28, 28), tf.float32) for i in range(3)
        ]
        x = features
        for index, kernel in enumerate(kernels):
            # backward computes the gradient of the first layer last
            x = tf.matmul(x, last_gradient_waits(kernel) if index == 0 else kernel)
        loss = tf.reduce_mean(tf.square(x - labels))
        optimizer = tf.compat.v1.train.AdamOptimizer()
        gradients = [g for g, _ in optimizer.compute_gradients(loss, var_list=kernels)]
        return estimator_ext.EstimatorSpec(
            mode,
            loss=loss,
            train_op=tf.identity(loss),
            host_call=(lambda *gs: optimizer.apply_gradients(zip(gs, kernels)), gradients),
        )

    def input_fn():
        x = np.random.RandomState(0).standard_normal((16, 28)).astype(np.float32)
        return tf.data.Dataset.from_tensors((x, x)).repeat()

    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        session_config=tf.compat.v1.ConfigProto(allow_soft_placement=False),
    )
    estimator = estimator_ext.Estimator(model_fn, model_dir, config)
    estimator.train(input_fn, max_steps=STEPS)
    print("buckets", sorted(buckets), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
