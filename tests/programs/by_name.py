"""Trains models by name, with the stock Estimator alone or with ours on the ranks of TF_CONFIG.

Each model is a function of a `Training`. The outcome is written to files: the variables, the
number of steps, and the error that ended the training. After an error the process continues with
the next model.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import estimator_ext
import hostopt

if os.environ.get("TEST_WITHOUT_V2"):
    tf.compat.v1.disable_v2_behavior()
estimator_ext.install()
# before a module of models imports estimators; alone, they must not see a cluster
CONFIG = json.loads(os.environ.get("TF_CONFIG", "{}"))
# A model that takes longer hangs. The process ends, and a new one trains the remaining models.
LIMIT_S = 120.0
ALONE = len(CONFIG.get("cluster", {}).get("worker", [])) < 2
if ALONE:
    os.environ.pop("TF_CONFIG", None)
# a second CPU device stands for a GPU
make_strategy = functools.partial(estimator_ext.HostOffloadStrategy, accelerator="/device:CPU:1")


class Outcome(tf.estimator.SessionRunHook):
    """Counts steps, and writes all variables of this rank to a file at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.steps = 0

    def begin(self) -> None:
        variables = tf.compat.v1.global_variables() + tf.compat.v1.trainable_variables()
        self._variables = {v.op.name: v for v in variables}
        trainable = [v.op.name for v in tf.compat.v1.trainable_variables()]
        self._variables["trainable"] = tf.constant(trainable)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps += 1

    def end(self, session: tf.compat.v1.Session) -> None:
        values = session.run(self._variables)
        values["trainable"] = values["trainable"].astype(str)
        np.savez(self._path, **values)


@dataclass
class Training:
    """The training of one model.

    Args:
      strategy: strategy of the ranks; None trains with the stock class.
      outcome: hook that every training of the model gets.
    """

    name: str
    directory: Path
    strategy: Any
    steps: int
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.directory / f"{self.name}-{self.rank}.npz")

    @property
    def rank(self) -> int | str:
        return "alone" if self.strategy is None else self.strategy.cluster.rank

    @property
    def model_dir(self) -> str:
        return str(self.directory / "models" / self.name)

    def config(self, **fields: Any) -> Any:
        """Returns a RunConfig with the strategy, or a stock one without a strategy."""
        if self.strategy is None:
            return tf.estimator.RunConfig(self.model_dir, **fields)
        return estimator_ext.RunConfig(self.model_dir, train_distribute=self.strategy, **fields)

    def estimator(self, model_fn: Callable[..., Any], **fields: Any) -> Any:
        """Returns an Estimator whose first checkpoint is at step 0; all runs start from it."""
        config = self.config(**{"save_checkpoints_steps": self.steps, **fields})
        if self.strategy is None:
            return tf.estimator.Estimator(model_fn, config=config)
        return estimator_ext.Estimator(model_fn, config=config)

    def train(
        self, model_fn: Callable[..., Any], input_fn: Callable[..., Any], **fields: Any
    ) -> None:
        estimator = self.estimator(model_fn, **fields)
        estimator.train(input_fn, hooks=[self.outcome], max_steps=self.steps)


def rows_of(input_context: Any, rows: int) -> slice:
    """Returns the slice of this rank in a global batch."""
    if input_context is None:
        return slice(0, rows)
    each = rows // input_context.num_input_pipelines
    return slice(
        each * input_context.input_pipeline_id, each * (input_context.input_pipeline_id + 1)
    )


def halves(batches: Any) -> Callable[..., tf.data.Dataset]:
    """Returns an input_fn that repeats this rank's rows of all global batches.

    Args:
      batches: arrays of shape [batches, rows, ...], in any structure.
    """

    def input_fn(input_context: Any = None) -> tf.data.Dataset:
        rows = tf.nest.flatten(batches)[0].shape[1]
        local = rows_of(input_context, rows)
        parts = tf.nest.map_structure(lambda array: array[:, local], batches)
        return tf.data.Dataset.from_tensor_slices(parts).repeat()

    return input_fn


def described(error: Exception) -> dict[str, Any]:
    code = error.exit_code if isinstance(error, hostopt.HostOptError) else 1
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {
        "type": type(error).__name__,
        "code": code,
        "message": str(error),
        "text": text[-6000:],
    }


def end_process_after(seconds: float) -> threading.Timer:
    def end() -> None:
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def train_all(
    models: dict[str, Callable[[Training], None]],
    make_strategy: Callable[[], Any] = make_strategy,
) -> None:
    """Trains the models in the first argument of the program, in that order."""
    settings = json.loads(sys.argv[1])
    strategy = None if ALONE else make_strategy()
    for name in settings["names"]:
        print("MODEL", name, flush=True)
        training = Training(name, Path(settings["directory"]), strategy, settings["steps"])
        tf.keras.utils.set_random_seed(1 + CONFIG.get("task", {}).get("index", 0))
        error = None
        with contextlib.ExitStack() as stack:
            stack.callback(end_process_after(LIMIT_S).cancel)
            if strategy is not None:
                stack.callback(strategy.close)  # after an error the ring is aborted
            try:
                models[name](training)
            except Exception as caught:
                error = described(caught)
        outcome = {"steps": training.outcome.steps, "error": error}
        path = training.directory / f"{name}-{training.rank}.json"
        path.write_text(json.dumps(outcome))


def train_table(
    train: Callable[[Any, Training], None], rows: Sequence[Any], *make_strategy: Any
) -> None:
    """Trains a model for each row of a table, which has a name, as `train_all` does."""
    train_all({row.name: functools.partial(train, row) for row in rows}, *make_strategy)
