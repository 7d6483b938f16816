"""Global batch sizes: what the user gives is that of all workers, what input_fn gets its own."""

from __future__ import annotations

from typing import Any, Callable

from estimator_ext._tf_estimator import ModeKeys, fn_args
from estimator_ext.run_config import whole_number

__all__: list[str] = []

_KEY = "batch_size"
_ARGUMENTS = {
    ModeKeys.TRAIN: "train_batch_size",
    ModeKeys.EVAL: "eval_batch_size",
    ModeKeys.PREDICT: "predict_batch_size",
}


class BatchSizes:
    """The batch sizes of this process, one for each mode that was given one.

    Args:
      train: global batch size of training; None for none, as with the others.
      evaluation: of evaluation, for which there is one worker.
      prediction: of prediction, for which there is one worker.
      workers: number of workers that train, each with one replica.
      params: those of the user.

    Raises:
      ValueError: a batch size is no whole number above 0, or not divisible by the number of
        workers, or params has one too.
    """

    def __init__(
        self,
        train: int | None,
        evaluation: int | None,
        prediction: int | None,
        workers: int,
        params: dict[str, Any] | None,
    ) -> None:
        given = {ModeKeys.TRAIN: train, ModeKeys.EVAL: evaluation, ModeKeys.PREDICT: prediction}
        self._local = {
            mode: whole_number(_ARGUMENTS[mode], size)
            for mode, size in given.items()
            if size is not None
        }
        if self._local and _KEY in (params or {}):
            names = " and ".join(_ARGUMENTS[mode] for mode in self._local)
            raise ValueError(
                f"params['{_KEY}'] is {params[_KEY]!r} and {names} is given as well: wanted one "
                f"of the two. Leave '{_KEY}' out of params; the Estimator puts it there"
            )
        if train is not None:
            self._local[ModeKeys.TRAIN] = _part(train, workers)

    @property
    def any(self) -> bool:
        """Whether a mode was given a batch size."""
        return bool(self._local)

    def add_to(self, params: dict[str, Any], mode: str) -> dict[str, Any]:
        """The params of a mode.

        Args:
          params: those of the user, which are not changed.
          mode: a `tf.estimator.ModeKeys`.

        Returns:
          A dict with the batch size of this process in it, where there is one for this mode.
        """
        return {**params, _KEY: self._local[mode]} if mode in self._local else params

    def check_input_fn(self, input_fn: Callable[..., Any], mode: str) -> None:
        """Refuse an input_fn that would not learn its batch size.

        Args:
          input_fn: as given by the user.
          mode: a `tf.estimator.ModeKeys`.

        Raises:
          ValueError: it has no argument `params`, but this mode has a batch size.
        """
        if mode in self._local and "params" not in fn_args(input_fn):
            raise ValueError(
                f"input_fn ({input_fn}) has no argument params, wanted one: {_ARGUMENTS[mode]} is "
                f"given, and the batch size of this process is in params['{_KEY}']. Write "
                f"def input_fn(params), or leave {_ARGUMENTS[mode]} out"
            )


def _part(train: int, workers: int) -> int:
    if train % workers:
        raise ValueError(
            f"train_batch_size is {train}, wanted a multiple of the number of workers, {workers}: "
            f"it is that of all workers together. Give {-(-train // workers) * workers}, say"
        )
    return train // workers
