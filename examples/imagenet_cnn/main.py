"""Trains a residual network on synthetic images as an Estimator, in the style of Horovod.

python examples/imagenet_cnn/main.py
hostopt run -np 2 -- python examples/imagenet_cnn/main.py
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import tensorflow as tf
from matplotlib.figure import Figure

import estimator_ext
import hostopt.tensorflow as hvd

estimator_ext.install()  # restores tf.estimator, which TensorFlow 2.16 removed

IMAGES = 1_281_167  # as many as ImageNet has for training


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model-dir", default="./imagenet_cnn_model", help="used by rank 0")
    parser.add_argument("--image-size", type=int, default=224, help="side in pixels")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32, help="channels of the first layers")
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
    parser.add_argument("--steps", type=int, default=100, help="global step at which to stop")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="for one worker")
    parser.add_argument("--warmup-steps", type=int, default=30)
    return parser.parse_args()


# --- data and model ------------------------------------------------------------------------------


def make_input_fn(args):
    """Returns an input_fn of endless images, float32 [n, side, side, 3], and their classes.

    An image is the pattern of its class, 4x4 coloured squares, plus noise.
    """
    shape = [args.image_size, args.image_size, 3]

    def image_of(number):
        label = tf.random.stateless_uniform([], [number, 0], maxval=args.classes, dtype=tf.int64)
        pattern = tf.random.stateless_normal([4, 4, 3], [label, 1])
        noise = tf.random.stateless_normal(shape, [number, 2])
        return tf.image.resize(pattern, shape[:2], method="nearest") + noise, label

    def input_fn():
        numbers = tf.data.Dataset.range(IMAGES)
        numbers = numbers.shard(hvd.size(), hvd.rank())  # each worker reads other images
        numbers = numbers.shuffle(10_000).repeat()
        images = numbers.map(image_of, num_parallel_calls=tf.data.AUTOTUNE)
        return images.batch(args.batch_size, drop_remainder=True).prefetch(2)

    return input_fn


def convolution(x, channels, size, stride=1):
    """Convolves, and normalises each image by itself.

    Batch normalization would keep moving averages, which differ between the workers.
    """
    x = tf.keras.layers.Conv2D(channels, size, stride, padding="same", use_bias=False)(x)
    return tf.keras.layers.GroupNormalization(groups=8)(x)


def residual_block(x, channels, stride):
    shortcut = x
    if stride > 1:
        shortcut = convolution(x, channels, size=1, stride=stride)
    x = tf.nn.relu(convolution(x, channels, size=3, stride=stride))
    return tf.nn.relu(convolution(x, channels, size=3) + shortcut)


def logits_of(images, classes, width):
    """Maps images to logits, float32 [n, classes]: ResNet-18 with one block per resolution."""
    x = tf.nn.relu(convolution(images, width, size=7, stride=2))
    x = tf.keras.layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for channels, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        x = residual_block(x, channels, stride)
    return tf.keras.layers.Dense(classes)(tf.reduce_mean(x, axis=[1, 2]))


# --- training ------------------------------------------------------------------------------------


def learning_rate_at(step, args):
    """Rises linearly from the rate for one worker to the number of workers times as much."""
    progress = tf.minimum(tf.cast(step, tf.float32) / args.warmup_steps, 1.0)
    return args.learning_rate * (1.0 + (hvd.size() - 1) * progress)


def make_model_fn(args):
    def model_fn(features, labels, mode):
        logits = logits_of(features, args.classes, args.width)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        global_step = tf.compat.v1.train.get_or_create_global_step()
        step = tf.identity(global_step, name="current_step")
        learning_rate = tf.identity(learning_rate_at(step, args), name="learning_rate")
        tf.identity(hvd.allreduce(loss), name="mean_loss")

        # averages the gradients of all workers before it applies them
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.MomentumOptimizer(learning_rate, momentum=0.9)
        )
        train_op = optimizer.minimize(loss, global_step=global_step)
        return tf.estimator.EstimatorSpec(mode=mode, loss=loss, train_op=train_op)

    return model_fn


class Recorder(tf.estimator.SessionRunHook):
    """Records each step, and what the variables are in the end.

    Attributes:
      rows: step, learning rate and loss, the mean over the workers, of each step.
      images_per_second: speed of this worker, without its first step; NaN if there is no other.
      variables: digest of the variables after the last step.
    """

    def __init__(self, batch_size):
        self.rows = []
        self.images_per_second = float("nan")
        self.variables = ""
        self._batch_size = batch_size
        self._ends = []

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(["current_step:0", "learning_rate:0", "mean_loss:0"])

    def after_run(self, run_context, run_values):
        self._ends.append(time.perf_counter())
        step, learning_rate, loss = map(float, run_values.results)
        self.rows.append((int(step), learning_rate, loss))
        if hvd.rank() == 0 and step % 10 == 0:
            print(
                f"step {step:.0f}: learning rate {learning_rate:.4f}, loss {loss:.3f}", flush=True
            )

    def end(self, session):
        if len(self._ends) > 1:
            images = self._batch_size * (len(self._ends) - 1)
            self.images_per_second = images / (self._ends[-1] - self._ends[0])
        values = session.run(tf.compat.v1.global_variables())
        self.variables = hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()[:16]


def step_of_checkpoint(model_dir):
    """Returns the global step that rank 0 resumes at, on all ranks."""
    step = 0
    if hvd.rank() == 0 and tf.train.latest_checkpoint(model_dir):
        step = int(tf.train.load_variable(model_dir, "global_step"))
    return hvd.broadcast_object(step)


def main():
    args = parse_args()
    hvd.init()
    if step_of_checkpoint(args.model_dir) >= args.steps:
        raise SystemExit(f"{args.model_dir} has reached step {args.steps} already")
    # one worker writes checkpoints; the others get its variables before the first step
    is_first = hvd.rank() == 0
    recorder = Recorder(args.batch_size)
    estimator = tf.estimator.Estimator(
        make_model_fn(args),
        model_dir=args.model_dir if is_first else None,
        config=tf.estimator.RunConfig(
            tf_random_seed=hvd.rank(),
            save_checkpoints_steps=50 if is_first else None,
            save_summary_steps=None,
            log_step_count_steps=None,
        ),
    )
    hooks = [hvd.BroadcastGlobalVariablesHook(root_rank=0), recorder]
    estimator.train(make_input_fn(args), hooks=hooks, max_steps=args.steps)

    speed = recorder.images_per_second
    print(f"rank {hvd.rank()}: {speed:.1f} images/s, variables {recorder.variables}", flush=True)
    total = sum(hvd.allgather_object(speed))
    if is_first:
        print(f"total: {total:.1f} images/s on {hvd.size()} workers")
        write(recorder.rows, Path(args.model_dir))


def write(rows, directory):
    """Writes step, learning rate and loss of each step, and their picture."""
    steps, learning_rates, losses = zip(*rows)
    numbers = {"step": steps, "learning_rate": learning_rates, "loss": losses}
    (directory / "steps.json").write_text(json.dumps(numbers))
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, learning_rates)
    left.set(xlabel="step", ylabel="learning rate", ylim=(0, 1.1 * max(learning_rates)))
    right.plot(steps, losses)
    right.set(xlabel="step", ylabel="loss, mean over the workers")
    figure.savefig(directory / "steps.png", dpi=80)


if __name__ == "__main__":
    main()
