"""tf.contrib for programs that use Estimator: names that TensorFlow or tf-slim still has.

A table lists, for each module of tf.contrib, the modules that have its names today. The first
module that has a name is used. Modules are imported only when a program uses a name.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import tensorflow as tf

from estimator_ext.errors import UnsupportedError

_V1 = "tensorflow.compat.v1"
# Each source is a module, or a module and an attribute separated by a colon.
_SOURCES: dict[str, tuple[str, ...]] = {
    "cluster_resolver": (f"{_V1}:distribute.cluster_resolver",),
    "data": (f"{_V1}:data.experimental",),
    "distribute": (f"{_V1}:distribute",),
    "estimator": (f"{_V1}:estimator.experimental", f"{_V1}:estimator"),
    "framework": ("tf_slim.ops", "tf_slim", f"{_V1}:train", _V1),
    "layers": ("tf_slim.layers", "tf_slim"),
    "lookup": (f"{_V1}:lookup", "tensorflow.python.ops.lookup_ops"),
    "metrics": ("tf_slim.metrics",),
    "rnn": (f"{_V1}:nn.rnn_cell", f"{_V1}:nn"),
    "slim": ("tf_slim",),
    "tpu": ("estimator_ext.tpu", f"{_V1}:tpu"),
    "training": ("estimator_ext.compat.hparams", "tf_slim.training", f"{_V1}:train"),
}
_SLIM = "tf_slim"
_ADVICE = "Replace it in the program, or remove the code that needs it"
ROOT = "tensorflow.contrib"


def add_contrib(packages: list[Any]) -> None:
    """Adds the attribute `contrib` to TensorFlow."""
    if hasattr(tf, "contrib"):
        return
    root = _Root(ROOT, "Names of tf.contrib that still exist.")
    root.__path__ = []  # a package
    sys.modules[ROOT] = root
    for name in _SOURCES:
        module = _Module(f"{ROOT}.{name}")
        sys.modules[module.__name__] = module
        vars(root)[name] = module
    for package in packages:
        package.contrib = root


def missing(name: str) -> UnsupportedError:
    """Returns the error for a module of tf.contrib that has no replacement."""
    return UnsupportedError(
        f"the program uses tf.contrib.{name}, which TensorFlow removed without a replacement. "
        f"{_ADVICE}"
    )


class _Root(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing(name)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        part = self.__name__.rpartition(".")[2]
        needs_slim = False
        for source in _SOURCES[part]:
            module, _, attributes = source.partition(":")
            try:
                owner: Any = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != _SLIM:
                    raise
                needs_slim = True
                continue
            for attribute in filter(None, attributes.split(".")):
                owner = getattr(owner, attribute)
            try:
                value = getattr(owner, name)
            except AttributeError:
                continue
            vars(self)[name] = value
            return value
        advice = _ADVICE
        if needs_slim:
            advice = "Run pip install tf-slim, which has most of these names"
        raise UnsupportedError(
            f"the program uses tf.contrib.{part}.{name}, which TensorFlow removed. {advice}"
        )
