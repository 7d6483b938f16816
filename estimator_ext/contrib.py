"""tf.contrib, as far as programs for Estimator use it and TensorFlow or tf-slim still has it.

A module of contrib is looked up in this table: the modules that have its names now, the first one
that knows a name wins. Nothing is imported before a program asks for a name.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import tensorflow as tf

from estimator_ext.errors import UnsupportedError

__all__: list[str] = []

_V1 = "tensorflow.compat.v1"
# a source is a module, or an attribute of one behind a colon
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
    "training": ("estimator_ext.hparams", "tf_slim.training", f"{_V1}:train"),
}
_SLIM = "tf_slim"
ROOT = "tensorflow.contrib"


def add_contrib(packages: list[Any]) -> None:
    """Puts `contrib` where programs look for it.

    Args:
      packages: `tensorflow` and its compat modules.
    """
    if hasattr(tf, "contrib"):
        return
    root = _Root(ROOT, "Names of tf.contrib that exist elsewhere.")
    root.__path__ = []  # a package
    sys.modules[ROOT] = root
    for name in _SOURCES:
        module = _Module(f"{ROOT}.{name}")
        sys.modules[module.__name__] = module
        vars(root)[name] = module
    for package in packages:
        package.contrib = root


def missing(name: str) -> UnsupportedError:
    """The error for a module of tf.contrib that nothing replaces.

    Args:
      name: of the module, within tf.contrib.

    Returns:
      The error, to be raised.
    """
    return UnsupportedError(
        f"the program uses tf.contrib.{name}, which TensorFlow removed and nothing replaces here. "
        "Replace it in the program, or leave out what needs it"
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
                found: Any = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != _SLIM:
                    raise
                needs_slim = True
                continue
            for attribute in filter(None, attributes.split(".")):
                found = getattr(found, attribute)
            try:
                value = getattr(found, name)
            except AttributeError:
                continue
            vars(self)[name] = value
            return value
        cure = "Replace it in the program, or leave out what needs it"
        if needs_slim:
            cure = "Run pip install tf-slim, which has most of these names"
        raise UnsupportedError(
            f"the program uses tf.contrib.{part}.{name}, which TensorFlow removed. {cure}"
        )
