"""install: `tf.estimator`, old names of modules, and tf.contrib, for existing programs."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from estimator_ext import tpu
from estimator_ext._tf_estimator import estimator_v1, estimator_v2
from estimator_ext._tf_estimator._loading import PACKAGES, check_keras, knows_estimator, stand_in
from estimator_ext.errors import UnsupportedError

# The compat packages are also attributes of each other.
_NESTED = {
    f"tensorflow._api.v2.compat.{outer}.compat.{inner}": f"_{inner}"
    for outer in ("v1", "v2")
    for inner in ("v1", "v2")
}
# Modules that have moved within TensorFlow.
_MOVED = {
    "tensorflow.python.estimator": "tensorflow_estimator.python.estimator",
    "tensorflow.python.training.tracking": "tensorflow.python.trackable",
    # graph_view was also in that package, but has moved elsewhere
    "tensorflow.python.trackable.graph_view": "tensorflow.python.checkpoint.graph_view",
    "tf_keras.legacy_tf_layers": "tf_keras.src.legacy_tf_layers",
}
_TF, _V1 = "tensorflow.python", "tensorflow.compat.v1"
# Names that modules had, and the modules and attributes that they are now.
_MOVED_NAMES = {
    f"{_TF}.feature_column.feature_column_lib:DenseFeatures": f"{_V1}:keras.layers.DenseFeatures",
    f"{_TF}.framework.ops:IndexedSlices": f"{_TF}.framework.indexed_slices:IndexedSlices",
    f"{_TF}.framework.ops:Tensor": f"{_TF}.framework.tensor:Tensor",
    f"{_TF}.ops.array_ops:stack": f"{_TF}.ops.array_ops_stack:stack",
    f"{_TF}.ops.array_ops:unstack": f"{_TF}.ops.array_ops_stack:unstack",
    f"{_TF}.ops.control_flow_ops:Assert": f"{_TF}.ops.control_flow_assert:Assert",
    f"{_TF}.ops.control_flow_ops:case": f"{_TF}.ops.control_flow_case:case",
    f"{_TF}.ops.control_flow_ops:cond": f"{_TF}.ops.cond:cond",
    f"{_TF}.ops.control_flow_ops:while_loop": f"{_TF}.ops.while_loop:while_loop",
    f"{_TF}.ops.variable_scope:variable": f"{_TF}.ops.variable_v1:VariableV1",
    f"{_TF}.util.nest:is_sequence": f"{_TF}.util.nest:is_nested",
}


def install(contrib: bool = False) -> None:
    """Restores `tf.estimator` and `tf.compat.v1.estimator`, which TensorFlow 2.16 removed.

    Call it once, before a program uses these names. `tf.keras` becomes Keras 2 (tf_keras), unless
    it was used before. Names of modules from before TensorFlow 2.0 work as well, such as
    `tensorflow.python.estimator`. May be called again.

    Args:
      contrib: also restores those names of `tf.contrib` that still exist elsewhere. Names of
        layers and slim need the package tf-slim.

    Raises:
      hostopt.ConfigError: `tf.keras` is already Keras 3.
    """
    _add_moved_modules()
    packages = {**PACKAGES, **_NESTED}
    modules: dict[str, Any] = {name: importlib.import_module(name) for name in packages}
    if contrib:
        _add_contrib([*modules.values()])
    if knows_estimator():
        return
    check_keras()
    estimator_v1.tpu = tpu
    for package, api in packages.items():
        estimator = {"_v1": estimator_v1, "_v2": estimator_v2}[api]
        modules[package].estimator = estimator
        # for `import tensorflow.estimator`
        sys.modules[f"{package}.estimator"] = estimator


def use_v1_api() -> None:
    """Makes `import tensorflow` import the API of TensorFlow 1, with its behavior.

    Modules that have already imported TensorFlow are not affected.
    """
    v1 = sys.modules["tensorflow.compat.v1"]
    v1.disable_v2_behavior()
    sys.modules["tensorflow"] = v1


# -- names that have moved --------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module that has moved from its new place."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if _new_name(name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return importlib.import_module(_new_name(spec.name) or "")

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _new_name(name: str) -> str | None:
    for old, new in _MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


def _add_moved_modules() -> None:
    """Makes old names of modules and attributes work; may be called again."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())  # first, so that it precedes the search in packages
    for module in {name.partition(":")[0] for name in _MOVED_NAMES}:
        vars(importlib.import_module(module))["__getattr__"] = _lookup(module)


def _lookup(module: str) -> Callable[[str], Any]:
    """Returns a module-level `__getattr__` that looks names up in their new modules."""

    def getattr_(name: str) -> Any:
        place = _MOVED_NAMES.get(f"{module}:{name}")
        if place is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return pkgutil.resolve_name(place)

    return getattr_


# -- tf.contrib: names that TensorFlow or tf-slim still has -----------------------------------

# For each module of tf.contrib, where its names are today: a module, a colon, and an attribute of
# it that has them. The first one that has a name is used, and imported only then.
_SOURCES: dict[str, tuple[str, ...]] = {
    "cluster_resolver": (f"{_V1}:distribute.cluster_resolver",),
    "data": (f"{_V1}:data.experimental",),
    "distribute": (f"{_V1}:distribute",),
    "estimator": (f"{_V1}:estimator.experimental", f"{_V1}:estimator"),
    "framework": ("tf_slim.ops:", "tf_slim:", f"{_V1}:train", f"{_V1}:"),
    "layers": ("tf_slim.layers:", "tf_slim:"),
    "lookup": (f"{_V1}:lookup", f"{_TF}.ops.lookup_ops:"),
    "metrics": ("tf_slim.metrics:",),
    "rnn": (f"{_V1}:nn.rnn_cell", f"{_V1}:nn"),
    "slim": ("tf_slim:",),
    "tpu": ("estimator_ext.tpu:", f"{_V1}:tpu"),
    "training": ("estimator_ext.compat.hparams:", "tf_slim.training:", f"{_V1}:train"),
}
_SLIM = "tf_slim"
ADVICE = "Replace it in the program, or remove the code that needs it"
ROOT = "tensorflow.contrib"


def _add_contrib(packages: list[Any]) -> None:
    if hasattr(tf, "contrib"):
        return
    root = sys.modules[ROOT] = stand_in(ROOT, _refuse)
    root.__path__ = []  # a package
    for part in _SOURCES:
        module = stand_in(f"{ROOT}.{part}", functools.partial(_find, part))
        vars(root)[part] = sys.modules[module.__name__] = module
    for package in packages:
        package.contrib = root


def missing(name: str) -> UnsupportedError:
    """Returns the error for a module of tf.contrib that has no replacement."""
    return UnsupportedError(
        f"the program uses tf.contrib.{name}, which TensorFlow removed without a replacement. "
        f"{ADVICE}"
    )


def _refuse(name: str) -> NoReturn:
    raise missing(name)


def _find(part: str, name: str) -> Any:
    advice = ADVICE
    for source in _SOURCES[part]:
        try:
            owner = pkgutil.resolve_name(source)
        except ModuleNotFoundError as error:
            if error.name != _SLIM:
                raise
            advice = "Run pip install tf-slim, which has most of these names"
            continue
        if hasattr(owner, name):
            return getattr(owner, name)
    raise UnsupportedError(
        f"the program uses tf.contrib.{part}.{name}, which TensorFlow removed. {advice}"
    )
