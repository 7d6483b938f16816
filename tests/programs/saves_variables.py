"""Runs a script or `-m MODULE`, and saves the variables of each rank when a training ends.

Seeds are fixed and dropout is disabled, so that trainings can be compared.
"""

import os
import runpy
import sys

import numpy as np
import tensorflow as tf

import hostopt


class SaveVariables(tf.compat.v1.train.SessionRunHook):
    def __init__(self, model):
        self._model = model

    def end(self, session):
        rank = hostopt.Cluster.from_resolver(None).rank or 0
        variables = tf.compat.v1.trainable_variables()
        values = session.run({variable.name: variable for variable in variables})
        path = os.path.join(os.environ["SAVE_VARIABLES_TO"], f"{self._model}.rank-{rank}.npz")
        np.savez(path, **values)


def add_hook(kind):
    stock = kind.train

    def train(self, input_fn, hooks=None, *arguments, **options):
        hook = SaveVariables(os.path.basename(self.config.model_dir))
        return stock(self, input_fn, [*(hooks or ()), hook], *arguments, **options)

    kind.train = train


add_hook(tf.compat.v1.estimator.Estimator)
tf.compat.v1.estimator.RunConfig.tf_random_seed = property(lambda config: 1)
for package in (tf, tf.compat.v1):
    package.nn.dropout = lambda x, *arguments, **options: tf.identity(x)
if sys.argv[1] == "-m":
    sys.path.insert(0, os.getcwd())
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
