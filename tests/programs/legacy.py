"""Trains small models whose checkpoints later versions must restore, and notes what they hold.

Arguments: directory, steps between two saves, last step, and names of cases. Each case trains in
DIRECTORY/CASE/model. It writes to DIRECTORY/CASE the values of all variables at each save, as the
session of rank 0 has them, those with which each rank begins, and the elements that each rank
computes with. None of these is read from a file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import estimator_ext
from estimator_ext.reduction import divided_updates

estimator_ext.install()
tf.get_logger().setLevel("INFO")
divided_updates._MIN_BYTES = 1  # or each checkpoint would have 200 kB
train = tf.compat.v1.train

ELEMENTS, BATCH = 40, 2
# a gradient is the mean of the elements times these; dyadic, so that sums have no rounding
FACTORS = np.arange(1, 8, dtype=np.float32) / 8
RATE = 2**-4


def momentum() -> Any:
    return train.MomentumOptimizer(RATE, 0.5)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: train.AdamOptimizer(RATE),
    "scaled": lambda: estimator_ext.LossScaleOptimizer(momentum(), growth_steps=3),
    "local": momentum,
    "divided": lambda: train.AdamOptimizer(RATE),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "divided": {"shard_optimizer": True},
    "local": {
        "sync_every": 4,
        "sync_fragments": 2,
        "outer_optimizer": lambda: train.AdamOptimizer(RATE),
    },
}
CONFIGS: dict[str, dict[str, Any]] = {"scaled": {"accumulate_steps": 2, "resume_data": "skip"}}


def input_fn(input_context: Any, name: str) -> tf.data.Dataset:
    size, rank = input_context.num_input_pipelines, input_context.input_pipeline_id
    if name == "scaled":  # counted, as a generator has no state

        def numbers() -> Iterator[int]:
            yield from range(ELEMENTS)

        data = tf.data.Dataset.from_generator(numbers, tf.int64, [])
    else:
        data = tf.data.Dataset.range(ELEMENTS)
    return data.shard(size, rank).shuffle(7, seed=3).repeat().batch(BATCH)


class Note:
    """Records the elements that a rank computes with."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.elements: list[list[int]] = []

    def model_fn(self, features: tf.Tensor, mode: str, params: dict[str, Any]) -> Any:
        zeros = tf.compat.v1.zeros_initializer()
        weights = tf.compat.v1.get_variable("weights", [7], initializer=zeros)
        bias = tf.compat.v1.get_variable("bias", [], initializer=zeros)
        with tf.control_dependencies([tf.numpy_function(self._note, [features], [])]):
            values = tf.reduce_sum(weights * FACTORS) + bias
        loss = tf.reduce_mean(tf.cast(features, tf.float32) * values)
        optimizer = OPTIMIZERS[params["name"]]()
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=optimizer.minimize(loss, train.get_global_step())
        )

    def _note(self, features: np.ndarray) -> None:
        self.elements.append(features.tolist())

    def write(self) -> None:
        (self.directory / f"elements-{self.rank}.json").write_text(json.dumps(self.elements))


class First(train.SessionRunHook):
    """Writes the values with which a rank begins; divided slots have none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self) -> None:
        self.values = variables()
        self.has_value = {
            name: tf.compat.v1.is_variable_initialized(variable)
            for name, variable in self.values.items()
        }

    def before_run(self, run_context: Any) -> None:
        if not self.path.exists():
            session = run_context.session
            has_value = session.run(self.has_value)
            found = {name: each for name, each in self.values.items() if has_value[name]}
            np.savez_compressed(self.path, **session.run(found))


class Saved(train.CheckpointSaverListener):
    """Writes all values when they are saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def after_save(self, session: Any, global_step_value: int) -> None:
        path = self.directory / f"values-{global_step_value}.npz"
        np.savez_compressed(path, **session.run(variables()))


def variables() -> dict[str, tf.Variable]:
    return {variable.op.name: variable for variable in tf.compat.v1.global_variables()}


def run(directory: Path, name: str, save_every: int, last_step: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    strategy = estimator_ext.HostOffloadStrategy(**STRATEGIES.get(name, {}))
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        save_checkpoints_steps=save_every,
        tf_random_seed=1,
        **CONFIGS.get(name, {}),
    )
    note = Note(directory, strategy.cluster.rank or 0)
    estimator = estimator_ext.Estimator(
        note.model_fn, str(directory / "model"), config, {"name": name}
    )
    estimator.train(
        lambda input_context: input_fn(input_context, name),
        hooks=[First(directory / f"begin-{note.rank}.npz")],
        saving_listeners=[Saved(directory)],
        max_steps=last_step,
    )
    note.write()
    strategy.close()


def run_stock(directory: Path, save_every: int, last_step: int) -> None:
    """Trains a canned estimator of TensorFlow, and a resumed one as an Estimator of hostopt."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.pop("TF_CONFIG", None)
    options = {"save_checkpoints_steps": save_every, "tf_random_seed": 1}
    estimator: Any = tf.estimator.DNNClassifier(
        [4],
        [tf.feature_column.numeric_column("x", shape=[3])],
        str(directory / "model"),
        optimizer=lambda: tf.keras.optimizers.legacy.Adam(RATE),
        config=tf.estimator.RunConfig(**options),
    )
    if (directory / "model" / "checkpoint").exists():
        strategy = estimator_ext.HostOffloadStrategy()
        config = estimator_ext.RunConfig(train_distribute=strategy, **options)
        estimator = estimator_ext.Estimator(estimator.model_fn, estimator.model_dir, config)
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 32
    batch = {"x": x}, np.arange(8) % 2
    estimator.train(
        lambda: tf.data.Dataset.from_tensors(batch).repeat(),
        hooks=[First(directory / "begin-0.npz")],
        saving_listeners=[Saved(directory)],
        max_steps=last_step,
    )


if __name__ == "__main__":
    root, steps = Path(sys.argv[1]), [int(each) for each in sys.argv[2:4]]
    for case in sys.argv[4:]:
        if case == "stock":
            run_stock(root / case, *steps)
        else:
            run(root / case, case, *steps)
