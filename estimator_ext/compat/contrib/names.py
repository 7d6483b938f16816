"""tf.contrib: where its names are today, and what to do about those that are gone."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from estimator_ext._tf_estimator._loading import stand_in
from estimator_ext.errors import UnsupportedError

ROOT = "tensorflow.contrib"
_TF, _V1, _OWN = "tensorflow.python", "tensorflow.compat.v1", "estimator_ext.compat.contrib"
_FUNCTIONS = f"{_OWN}.functions:"

# For each module of tf.contrib, where its names are today: a module, a colon, and an attribute of
# it that has them. The first one that has a name is used, and imported only then. So modules of
# _OWN import tensorflow.compat.v2: with --v1, `tensorflow` is the API of TensorFlow 1 by then.
_SOURCES: dict[str, tuple[str, ...]] = {
    # modules that contain others only
    "compiler": (),
    "tensorboard": (),
    # other names of the module around them
    **dict.fromkeys([f"learn.{name}" for name in ("estimators", "monitors", "utils")], ()),
    **dict.fromkeys(
        ["learn.learn_runner", "predictor.predictor_factories", "summary.summary"], ()
    ),
    # of the same name today
    **{name: (f"{_V1}:{name}",) for name in ("autograph", "feature_column", "image", "keras")},
    **{name: (f"{_V1}:{name}",) for name in ("linalg", "lite", "nn", "saved_model", "signal")},
    # of this package
    **{name: (f"{_OWN}.{name}:",) for name in ("crf", "learn", "opt", "predictor")},
    "checkpoint": (f"{_V1}:train", f"{_TF}.trackable.data_structures:"),
    "cluster_resolver": (f"{_V1}:distribute.cluster_resolver",),
    "compiler.jit": (f"{_TF}.compiler.xla.jit:",),
    "compiler.xla": (f"{_V1}:xla.experimental",),
    "data": (f"{_V1}:data.experimental", f"{_V1}:data", _FUNCTIONS),
    "distribute": (f"{_V1}:distribute", f"{_V1}:distribute.experimental"),
    "distributions": ("tensorflow_probability:distributions", f"{_V1}:distributions"),
    "eager": (_FUNCTIONS, f"{_V1}:", f"{_TF}.eager.context:", f"{_TF}.eager.backprop:"),
    "estimator": (f"{_V1}:estimator.experimental", f"{_V1}:estimator"),
    "framework": (
        "tf_slim.ops.arg_scope:",
        "tf_slim.ops.variables:",
        f"{_V1}:train",
        f"{_V1}:",
        f"{_V1}:debugging",
        f"{_TF}.util.deprecation:",
        f"{_TF}.framework.smart_cond:",
    ),
    "gan": ("tensorflow_gan:",),
    "hooks": (f"{_V1}:train",),
    "layers": ("tf_slim.layers:", "tf_slim:"),
    "lookup": (_FUNCTIONS, f"{_V1}:lookup", f"{_TF}.ops.lookup_ops:"),
    "losses": ("tf_slim.losses:",),
    "losses.metric_learning": ("tf_slim.losses:metric_learning",),
    "metrics": ("tf_slim.metrics:", f"{_V1}:math"),
    "proto": (f"{_V1}:io",),
    "rnn": (f"{_OWN}.rnn:", f"{_V1}:nn.rnn_cell", f"{_V1}:nn"),
    "seq2seq": (_FUNCTIONS,),
    "slim": ("tf_slim:",),
    "slim.nets": ("tf_slim.nets:",),
    "slim.python.slim.data": ("tf_slim.data:",),
    "slim.python.slim.nets": ("tf_slim.nets:",),
    "stateless": (f"{_TF}.ops.stateless_random_ops:",),
    "summary": (f"{_TF}.ops.summary_ops_v2:",),
    "tensorboard.plugins": ("tensorboard.plugins:",),
    "tensorboard.plugins.projector": ("tensorboard.plugins.projector:",),
    "tpu": ("estimator_ext.tpu:", f"{_V1}:tpu", f"{_TF}.tpu.tpu_function:"),
    "training": (
        f"{_OWN}.hparams:",
        "tf_slim.training.training:",
        "tf_slim.training.evaluation:",
        f"{_V1}:train",
    ),
    "util": (f"{_TF}.framework.tensor_util:", f"{_TF}.framework.meta_graph:"),
}
# Names that have another name today.
_NAMES = {
    "distribute.CollectiveAllReduceStrategy": f"{_V1}:distribute.experimental."
    "MultiWorkerMirroredStrategy",
    "distribute.DistributeConfig": f"{_TF}.distribute.distribute_config:DistributeConfig",
    "eager.Variable": f"{_TF}.ops.resource_variable_ops:ResourceVariable",
    "eager.implicit_gradients": f"{_TF}.eager.backprop:implicit_grad",
    "eager.implicit_value_and_gradients": f"{_TF}.eager.backprop:implicit_val_and_grad",
    "eager.metrics": "tensorflow.compat.v2:metrics",
    "eager.py_func": f"{_V1}:py_function",
    "framework.get_name_scope": "tensorflow.compat.v2:get_current_name_scope",
    "framework.nest": f"{_TF}.util.nest",
    "nn.nth_element": f"{_TF}.ops.nn_ops:nth_element",
    "summary.all_summary_ops": f"{_TF}.ops.summary_ops_v2:all_v2_summary_ops",
    "util.make_ndarray": f"{_V1}:make_ndarray",
}
# Modules below others: `rnn.python.ops.rnn_cell` has the names of `rnn`.
_INNER = re.compile(
    r"(\w+)\.python(\.[a-z]\w*){0,2}"
    r"|(learn)\.python\.learn\.(estimators|utils)\.[a-z]\w*"
    r"|(learn)\.(estimators|utils)\.[a-z]\w*"
)
_PACKAGES = {
    "tf_slim": "Run pip install tf-slim, which has most of these names",
    "tensorflow_gan": "Run pip install tensorflow-gan, which has these names",
    "tensorflow_probability": "Run pip install tensorflow-probability, in the version for your "
    "TensorFlow",
}
REPLACE = "Replace it in the program, or remove the code that needs it"
_ADVICE = {  # for the beginnings of names
    "": REPLACE,
    "boosted_trees": "Use the package tensorflow-decision-forests, or tf.estimator.DNNRegressor",
    "cudnn_rnn": "Use tf.contrib.rnn.LSTMBlockFusedCell, or LSTM or GRU of tf.keras.layers",
    "data": "Use tf.data",
    "eager": "Use tf.GradientTape, tf.function and the metrics of tf.keras",
    "estimator": "Use tf.estimator, whose heads are called RegressionHead, MultiClassHead, ...",
    "factorization": "Use tf.estimator.experimental.KMeans for k-means",
    "image": "Use tf.image, or tf.raw_ops.ImageProjectiveTransformV3",
    "integrate": "Use tfp.math.ode of the package tensorflow-probability",
    "layers": "Use tf.feature_column for columns, and tf.keras.layers for layers",
    "learn": "Train with tf.estimator.Estimator, whose model_fn returns a tf.estimator."
    "EstimatorSpec, or with a canned estimator of tf.estimator",
    "memory_stats": "Use tf.config.experimental.get_memory_info",
    "mixed_precision": "Use tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite",
    "nccl": "Remove it: gradients are reduced over the ranks",
    "nn.alpha_dropout": "Use tf.keras.layers.AlphaDropout",
    "opt": "Use an optimizer of tf.compat.v1.train or tf.keras.optimizers.legacy",
    "rnn": "Use a cell of tf.compat.v1.nn.rnn_cell, or a layer of tf.keras.layers",
    "seq2seq": "Copy the class from the source of TensorFlow 1.15 into the program: no package "
    "has it for this TensorFlow",
    "tensor_forest": "Use the package tensorflow-decision-forests",
    "timeseries": "Use tfp.sts of the package tensorflow-probability",
    "training": "Use tf.data.Dataset.bucket_by_sequence_length for buckets, and "
    "tf.data.Dataset.batch for queues of batches",
}


def add_contrib(packages: Iterable[Any]) -> None:
    """Adds tf.contrib to packages of TensorFlow; may be called again."""
    if hasattr(tf, "contrib"):
        return
    sys.modules[ROOT] = _stand_in("")
    for package in packages:
        package.contrib = sys.modules[ROOT]


def import_own_names() -> None:
    """Imports what this package implements itself."""
    for source in {source for sources in _SOURCES.values() for source in sources}:
        if source.startswith(_OWN):
            pkgutil.resolve_name(source)


def missing(name: str) -> UnsupportedError:
    """Returns the error for a name of tf.contrib, such as "crf.crf_decode", that is not served."""
    text = f"the program uses tf.contrib.{name}, which TensorFlow removed"
    for package, advice in _PACKAGES.items():
        sources = [each for key, each in _SOURCES.items() if _is_below(name, key)]
        is_used = any(source.startswith(package) for each in sources for source in each)
        if is_used and importlib.util.find_spec(package) is None:
            return UnsupportedError(f"{text}. {advice}")
    begin = max((key for key in _ADVICE if _is_below(name, key)), key=len)
    return UnsupportedError(f"{text}. {_ADVICE[begin]}")


def _is_below(name: str, key: str) -> bool:
    return not key or name == key or name.startswith(f"{key}.")


def contrib_module(name: str) -> types.ModuleType | None:
    """Returns a module of tf.contrib by its full name, or None if there is none."""
    if not name.startswith(f"{ROOT}."):
        return None
    part = name[len(ROOT) + 1 :]
    if _is_module(part):
        return _stand_in(part)
    parent, _, last = name.rpartition(".")
    found = getattr(sys.modules[parent], last, None)
    return found if isinstance(found, types.ModuleType) else None


def _is_module(part: str) -> bool:
    match = _INNER.fullmatch(part)
    return part in _SOURCES or bool(match and {*_SOURCES} & {*match.groups()})


def _stand_in(part: str) -> types.ModuleType:
    module = stand_in(".".join(filter(None, [ROOT, part])), functools.partial(_find, part))
    module.__path__ = []  # a package
    return module


def _find(part: str, name: str) -> Any:
    """Returns a name of a module, or raises an error."""
    full = ".".join(filter(None, [part, name]))
    place = _NAMES.get(f"{part.partition('.')[0]}.{name}")
    if place is not None:
        return pkgutil.resolve_name(place)
    is_module = _is_module(full)
    if is_module and (full in _SOURCES or full.count(".") < 3):
        return importlib.import_module(f"{ROOT}.{full}")
    for owner in _owners(part):
        value = getattr(owner, name, None)
        if value is not None and not (is_module and isinstance(value, types.ModuleType)):
            return value
    if is_module:
        return importlib.import_module(f"{ROOT}.{full}")
    raise missing(full)


def _owners(part: str) -> Iterator[Any]:
    """Yields what has the names of a module: its sources, and those of the module around it."""
    for source in _SOURCES.get(part, ()):
        try:
            yield pkgutil.resolve_name(source)
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:
                raise
    parent, _, last = part.rpartition(".")
    if parent:
        owners = [*_owners(parent)]
        inner = (getattr(owner, last, None) for owner in owners)
        yield from (each for each in inner if isinstance(each, types.ModuleType))
        yield from owners
