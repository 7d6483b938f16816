"""Global batch sizes, and the part of them that each worker reads."""

from __future__ import annotations

from typing import Any, Callable

from estimator_ext._tf_estimator import ModeKeys, fn_args
from estimator_ext.estimator.run_config import positive_integer

_KEY = "batch_size"
_ARGUMENTS = {
    ModeKeys.TRAIN: "train_batch_size",
    ModeKeys.EVAL: "eval_batch_size",
    ModeKeys.PREDICT: "predict_batch_size",
}


class BatchSizes:
    """Batch sizes of this process by mode.

    Args:
      train: global batch size, in examples; evaluation and prediction have one worker.
      workers: number of workers that train, each with one replica.
    """

    def __init__(
        self,
        train: int | None,
        evaluation: int | None,
        prediction: int | None,
        workers: int,
        params: dict[str, Any] | None,
    ) -> None:
        sizes = {ModeKeys.TRAIN: train, ModeKeys.EVAL: evaluation, ModeKeys.PREDICT: prediction}
        self._local = {
            mode: positive_integer(_ARGUMENTS[mode], size)
            for mode, size in sizes.items()
            if size is not None
        }
        if self._local and _KEY in (params or {}):
            names = " and ".join(_ARGUMENTS[mode] for mode in self._local)
            raise ValueError(
                f"params['{_KEY}'] is {params[_KEY]!r} and {names} is given as well: wanted one "
                f"of the two. Leave '{_KEY}' out of params; the Estimator puts it there"
            )
        if train is not None:
            self._local[ModeKeys.TRAIN] = _local_size(train, workers)

    @property
    def any(self) -> bool:
        """True if any mode has a batch size."""
        return bool(self._local)

    def add_to(self, params: dict[str, Any], mode: str) -> dict[str, Any]:
        """Returns a copy of params with the batch size; params themselves if there is none."""
        return {**params, _KEY: self._local[mode]} if mode in self._local else params

    def check_input_fn(self, input_fn: Callable[..., Any], mode: str) -> None:
        """Checks that an input_fn can receive its batch size in an argument `params`."""
        if mode in self._local and "params" not in fn_args(input_fn):
            raise ValueError(
                f"input_fn ({input_fn}) has no argument params, wanted one: {_ARGUMENTS[mode]} is "
                f"given, and the batch size of this process is in params['{_KEY}']. Write "
                f"def input_fn(params), or leave {_ARGUMENTS[mode]} out"
            )


def _local_size(train: int, workers: int) -> int:
    if train % workers:
        raise ValueError(
            f"train_batch_size is {train}, wanted a multiple of the number of workers, {workers}: "
            f"it is the size for all workers. Give for example {-(-train // workers) * workers}"
        )
    return train // workers
