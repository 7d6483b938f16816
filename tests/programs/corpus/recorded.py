"""Runs a script or `-m MODULE`, and saves the variables of each rank around its trainings.

Random initial values are those of a seed and the name of the operation, and dropout is disabled,
so that trainings can be compared.
"""

import os
import runpy
import sys
import zlib

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import random_seed

import hostopt

v1 = tf.compat.v1
DIRECTORY = os.environ["RECORD_TO"]
RANK = hostopt.Cluster.from_tf_config().rank or 0  # before the program changes TF_CONFIG


class SaveVariables(v1.train.SessionRunHook):
    """Saves the trainable variables when a model is created and when a training ends."""

    def __init__(self, model):
        self._model = model

    def after_create_session(self, session, coord):
        with session.graph.as_default():
            if not os.path.exists(self._path("initial")):
                self._save(session, "initial")

    def end(self, session):
        self._save(session, "final")

    def _path(self, when):
        return os.path.join(DIRECTORY, f"{self._model}.{when}-{RANK}.npz")

    def _save(self, session, when):
        values = {variable.name: variable for variable in v1.trainable_variables()}
        np.savez(self._path(when), **session.run({**values, "step": v1.train.get_global_step()}))


def record_trainings(kind):
    stock, models = kind.train, []

    def train(self, input_fn, hooks=None, *arguments, **options):
        directory = self.config.model_dir
        if directory not in models:
            models.append(directory)
        is_named = directory.startswith(DIRECTORY)  # or else a temporary directory
        name = os.path.basename(directory) if is_named else f"model-{models.index(directory)}"
        return stock(self, input_fn, [*(hooks or ()), SaveVariables(name)], *arguments, **options)

    kind.train = train


def seed_by_name(stock):
    def get_seed(seed):
        if tf.executing_eagerly():
            return stock(seed)
        scope = v1.get_default_graph().get_name_scope()
        return 1, zlib.crc32(scope.encode()) >> 1 if seed is None else seed

    return get_seed


record_trainings(v1.estimator.Estimator)
random_seed.get_seed = seed_by_name(random_seed.get_seed)
for package in (tf, v1):
    package.nn.dropout = lambda x, *arguments, **options: tf.identity(x)
if sys.argv[1] == "-m":
    sys.path.insert(0, os.getcwd())
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
