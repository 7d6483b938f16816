"""install: `tf.estimator`, and old names of modules, for existing programs."""

from __future__ import annotations

import collections
import functools
import importlib.abc
import importlib.machinery
import inspect
import pkgutil
import sys
import types
from collections import abc
from typing import Any

import numpy as np

from estimator_ext import tpu
from estimator_ext._tf_estimator import estimator_v1, estimator_v2
from estimator_ext._tf_estimator._loading import PACKAGES, check_keras, knows_estimator
from estimator_ext.compat.contrib.names import add_contrib, contrib_module, import_own_names

# The compat packages are also attributes of each other.
_NESTED = {
    f"tensorflow._api.v2.compat.{outer}.compat.{inner}": f"_{inner}"
    for outer in ("v1", "v2")
    for inner in ("v1", "v2")
}
# Modules that have moved within TensorFlow.
_MOVED = {
    "tensorflow.python.estimator": "tensorflow_estimator.python.estimator",
    "tensorflow.python.tpu.tpu_config": "estimator_ext.tpu",
    "tensorflow.python.tpu.tpu_estimator": "estimator_ext.tpu",
    "tensorflow.python.training.tracking": "tensorflow.python.trackable",
    # graph_view was also in that package, but has moved elsewhere
    "tensorflow.python.trackable.graph_view": "tensorflow.python.checkpoint.graph_view",
    "tf_keras.legacy_tf_layers": "tf_keras.src.legacy_tf_layers",
}
# Modules of Horovod and of SageMaker's library; the first one that is found counts.
HOROVOD = {
    "horovod.keras": "hostopt.keras",
    "horovod.tensorflow.compression": "hostopt.tensorflow.compression",
    "horovod.tensorflow.keras": "hostopt.tensorflow.keras",
    "horovod.tensorflow.mpi_ops": "estimator_ext.horovod",
    "horovod.tensorflow": "estimator_ext.horovod",
    "smdistributed.dataparallel.tensorflow.keras": "hostopt.tensorflow.keras",
    "smdistributed.dataparallel.tensorflow": "estimator_ext.horovod",
}
_TF, _V1 = "tensorflow.python", "tensorflow.compat.v1"
# Names that modules had, and the modules and attributes that they are now.
_MOVED_NAMES = {
    f"{_TF}.feature_column.feature_column_lib:DenseFeatures": f"{_V1}:keras.layers.DenseFeatures",
    f"{_TF}.framework.ops:IndexedSlices": f"{_TF}.framework.indexed_slices:IndexedSlices",
    f"{_TF}.framework.ops:register_tensor_conversion_function": f"{_TF}.framework."
    "tensor_conversion_registry:register_tensor_conversion_function",
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
        add_contrib(modules.values())
    if knows_estimator():
        return
    check_keras()
    estimator_v1.tpu = tpu
    for package, api in packages.items():
        estimator = estimator_v1 if api == "_v1" else estimator_v2
        modules[package].estimator = estimator
        # for `import tensorflow.estimator`
        sys.modules[f"{package}.estimator"] = estimator


def use_v1_api() -> None:
    """Makes `import tensorflow` import the API of TensorFlow 1, with its behavior.

    Modules that have already imported TensorFlow are not affected.
    """
    import_own_names()  # while `import tensorflow` imports the API of TensorFlow 2
    v1 = sys.modules["tensorflow.compat.v1"]
    v1.disable_v2_behavior()
    sys.modules["tensorflow"] = v1


def serve_horovod() -> None:
    """Makes imports of Horovod, and of SageMaker's library, find the same names of this package.

    They do so also if these packages are installed.
    """
    _add_moved_modules()
    _MOVED.update(HOROVOD)
    for name in ("horovod", "smdistributed", "smdistributed.dataparallel"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)


def restore_python_names() -> None:
    """Restores names that Python 3.10 and 3.11 and NumPy 1.24 removed, for old programs."""
    kinds = {kind.__name__: kind for kind in (bool, int, float, complex, object, str)}
    containers = {name: getattr(abc, name) for name in abc.__all__}
    Spec = collections.namedtuple("Spec", "args varargs keywords defaults")
    removed: dict[Any, dict[str, Any]] = {
        inspect: {"getargspec": lambda function: Spec(*inspect.getfullargspec(function)[:4])},
        np: kinds,
        collections: containers,
    }
    for module, names in removed.items():
        for name, value in names.items():
            if name not in vars(module):
                setattr(module, name, value)


# -- names that have moved --------------------------------------------------------------------


def _moved_module(name: str) -> types.ModuleType | None:
    """Returns the module that an old name of a module stands for; None for other names."""
    for old, new in _MOVED.items():
        if name == old or name.startswith(f"{old}."):
            new_name = new + name[len(old) :]
            try:
                return importlib.import_module(new_name)
            except ModuleNotFoundError as error:
                if error.name != new_name:
                    raise
                return None  # so the error names the module that the program imports
    return None


def _add_moved_modules() -> None:
    """Makes old names of modules and attributes work; may be called again."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())  # before the search in packages
    for module in {name.partition(":")[0] for name in _MOVED_NAMES}:
        lookup = functools.partial(_moved_name, module)
        vars(importlib.import_module(module))["__getattr__"] = lookup


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by old names, which they do not have themselves."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        module = contrib_module(name) or _moved_module(name)
        if module is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, loader_state=module)

    def exec_module(self, module: Any) -> None:
        """Puts the module that was found in the place of a new one."""
        sys.modules[module.__name__] = module.__spec__.loader_state


def _moved_name(module: str, name: str) -> Any:
    """Returns what a name of a module is now."""
    place = _MOVED_NAMES.get(f"{module}:{name}")
    if place is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return pkgutil.resolve_name(place)
