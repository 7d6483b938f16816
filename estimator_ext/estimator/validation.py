"""Validation of input_fn, model_fn, params and batch sizes, and of subclasses that train alone.

`check_params`, `check_data` and `check_spec` are the rules of accelerator estimators: they apply
with `RunConfig(strict=True)`, with iterations_per_loop above 1, and with a batch size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext._tf_estimator import ModeKeys, fn_args
from estimator_ext.errors import UnsupportedError
from estimator_ext.estimator.run_config import positive_integer
from estimator_ext.strategy.strategy import HostOffloadStrategy

_STOCK = "leave out strict, iterations_per_loop and batch sizes for the stock rules"
_WANTED = "features or (features, labels), each a tensor or a dict of tensors"
# What a subclass may override to train; the stock class forbids it, but some disable its check.
_TRAINING = (
    "_train_model",
    "_train_model_default",
    "_train_model_distributed",
    "_train_with_estimator_spec",
)
_NEEDED = {
    ModeKeys.TRAIN: ("loss", "train_op"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}
_ARGUMENTS = {
    ModeKeys.TRAIN: "train_batch_size",
    ModeKeys.EVAL: "eval_batch_size",
    ModeKeys.PREDICT: "predict_batch_size",
}


def check_params(params: dict[str, Any] | None) -> None:
    """Checks that params has no reserved key."""
    if isinstance(params, dict) and "input_fn" in params:
        raise ValueError(
            "params has the key 'input_fn', wanted any other name: 'input_fn' is reserved. Rename "
            f"it, or {_STOCK}"
        )


def check_data(data: Any) -> None:
    """Checks that an input_fn returned a dataset of features, or of features and labels."""
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"input_fn must return Dataset: got a {type(data).__name__}, wanted a tf.data.Dataset "
            f"of {_WANTED}. Return for example tf.data.Dataset.from_tensors((features, labels))"
            f".repeat(), or {_STOCK}, which allow tensors"
        )
    element = data.element_spec
    if isinstance(element, (tuple, list)) and len(element) != 2:
        raise ValueError(
            f"input_fn returned a Dataset of {type(element).__name__}s of {len(element)}, wanted "
            f"{_WANTED}. Put several features into one dict"
        )


def check_spec(spec: StockSpec, mode: str) -> None:
    """Checks that a spec, stock or extended, has all fields that its mode requires."""
    for name in _NEEDED[mode]:
        value = getattr(spec, name)
        if value is None or (isinstance(value, dict) and not value):
            raise ValueError(
                f"Missing {name}: model_fn was called with mode {mode!r} and returned an "
                f"EstimatorSpec of mode {spec.mode!r} without {name}. Give it {name}"
            )
    has_metrics = spec.eval_metric_ops or getattr(spec, "eval_metrics", None) is not None
    if mode == ModeKeys.EVAL and not has_metrics:
        raise ValueError(
            "EstimatorSpec must contain either eval_metrics or eval_metric_ops in evaluation, got "
            f"neither. Give it metrics, or {_STOCK}"
        )


def check_is_on_ranks(estimator: Any) -> None:
    """Checks that an estimator does not train on this rank alone, beside its strategy.

    Its attribute `_is_on_ranks` is True if the graph of its training is built for all ranks.
    """
    strategy = estimator._train_distribution
    size = strategy.cluster.size if isinstance(strategy, HostOffloadStrategy) else 1
    if estimator._is_on_ranks or size == 1:
        return
    kinds = itertools.takewhile(lambda k: "_is_on_ranks" not in vars(k), type(estimator).__mro__)
    own = [f"{k.__qualname__}.{name}" for k in kinds for name in _TRAINING if name in vars(k)]
    raise UnsupportedError(
        f"{', '.join(own) or type(estimator).__qualname__} trains each of {size} ranks alone, "
        "beside their strategy. Call the method that it overrides, or train in one process"
    )


def local_batch_sizes(
    sizes: Sequence[int | None], workers: int, params: dict[str, Any] | None
) -> dict[str, int]:
    """Returns batch sizes of this process by mode, from global ones in examples.

    All workers share a batch of training. One worker evaluates and predicts.
    """
    local = {
        mode: positive_integer(name, size)
        for (mode, name), size in zip(_ARGUMENTS.items(), sizes)
        if size is not None
    }
    if local and params and "batch_size" in params:
        names = " and ".join(_ARGUMENTS[mode] for mode in local)
        raise ValueError(
            f"params['batch_size'] is {params['batch_size']!r} and {names} is given as well: "
            "wanted one of the two. Leave 'batch_size' out of params; the Estimator puts it there"
        )
    train = local.get(ModeKeys.TRAIN)
    if train is not None:
        if train % workers:
            raise ValueError(
                f"train_batch_size is {train}, wanted a multiple of the number of workers, "
                f"{workers}: it is the size for all workers. Give for example "
                f"{-(-train // workers) * workers}"
            )
        local[ModeKeys.TRAIN] = train // workers
    return local


def check_takes_params(input_fn: Callable[..., Any], mode: str) -> None:
    """Checks that an input_fn can receive its batch size in an argument `params`."""
    if "params" not in fn_args(input_fn):
        raise ValueError(
            f"input_fn ({input_fn}) has no argument params, wanted one: {_ARGUMENTS[mode]} is "
            "given, and the batch size of this process is in params['batch_size']. Write "
            f"def input_fn(params), or leave {_ARGUMENTS[mode]} out"
        )
