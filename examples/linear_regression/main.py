"""Fits y = w x + b on several workers, and draws their paths over the loss surface.

python examples/linear_regression/main.py
hostopt run -np 3 -- python examples/linear_regression/main.py
"""

import argparse
import json
from pathlib import Path

import numpy as np
import picture
import tensorflow as tf

import hostopt.tensorflow as hvd

STAGES = (
    "each worker trains alone",
    "the data is sharded",
    "the variables are broadcast",
    "the gradients are averaged",
)
ALONE, SHARDED, BROADCAST, DISTRIBUTED = range(len(STAGES))

SEED = 109  # the random starts of ranks 0 to 3 lie far apart


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--stage", type=int, choices=range(len(STAGES)), help="stage to run; all if not given"
    )
    parser.add_argument(
        "--output", type=Path, default="linear_regression_output", help="directory"
    )
    parser.add_argument("--rows", type=int, default=60, help="points; a multiple of the workers")
    parser.add_argument("--batch-size", type=int, default=4, help="points per worker and step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    return parser.parse_args()


def make_data(rows):
    """Returns points of the line y = 2 x + 1 with noise, float32 [rows] each."""
    rng = np.random.default_rng(seed=1)
    x = rng.uniform(-1, 2, size=rows)
    y = 2 * x + 1 + rng.normal(scale=1.5, size=rows)
    return x.astype(np.float32), y.astype(np.float32)


def batches(stage, x, y, batch_size):
    points = tf.data.Dataset.from_tensor_slices((x, y))
    if stage >= SHARDED:
        points = points.shard(hvd.size(), hvd.rank())
    else:
        points = points.shuffle(len(x), seed=hvd.rank())
    return points.repeat().batch(batch_size)


def train(stage, x, y, args):
    """Trains this worker.

    Returns:
      Its path: (w, b) at the start and after each step, float32 [steps + 1, 2].
    """
    start = np.random.default_rng(SEED + hvd.rank()).uniform([-2, -2], [6, 4])
    w, b = (tf.Variable(value, dtype=tf.float32) for value in start)
    optimizer = tf.keras.optimizers.SGD(args.learning_rate)

    if stage >= BROADCAST:
        hvd.broadcast_variables([w, b], root_rank=0)
    if stage >= DISTRIBUTED:
        optimizer = hvd.DistributedOptimizer(optimizer)

    path = [(w.numpy(), b.numpy())]
    for x_batch, y_batch in batches(stage, x, y, args.batch_size).take(args.steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(w * x_batch + b - y_batch))
        gradients = tape.gradient(loss, [w, b])
        optimizer.apply_gradients(zip(gradients, [w, b]))
        path.append((w.numpy(), b.numpy()))
    return np.array(path)


def report(stage, paths, x, y):
    print(f"stage {stage}: {STAGES[stage]}")
    for worker, path in enumerate(paths):
        (w0, b0), (w, b) = path[0], path[-1]
        loss = np.mean((w * x + b - y) ** 2)
        print(
            f"  worker {worker}: (w, b) from ({w0:.3f}, {b0:.3f}) to ({w:.3f}, {b:.3f}), "
            f"loss {loss:.4f}"
        )
    spread = np.linalg.norm(paths - paths[0], axis=-1).max()
    print(f"  largest distance from worker 0: {spread:.6f}", flush=True)


def write(paths, x, y, directory):
    """Writes a picture of each stage, one of all stages, and the numbers."""
    directory.mkdir(parents=True, exist_ok=True)
    titled = {f"{stage}: {STAGES[stage]}": paths[stage] for stage in paths}
    for stage, title in zip(paths, titled):
        picture.draw({title: paths[stage]}, x, y, directory / f"stage{stage}.png")
    picture.draw(titled, x, y, directory / "stages.png")
    numbers = {stage: paths[stage].tolist() for stage in paths}
    (directory / "paths.json").write_text(json.dumps(numbers))
    print(f"pictures: {directory}")


def main():
    args = parse_args()
    hvd.init()
    x, y = make_data(args.rows)
    stages = range(len(STAGES)) if args.stage is None else [args.stage]
    paths = {s: np.array(hvd.allgather_object(train(s, x, y, args))) for s in stages}
    if hvd.rank() == 0:
        for stage in stages:
            report(stage, paths[stage], x, y)
        write(paths, x, y, args.output)


if __name__ == "__main__":
    main()
