"""The strategy of programs that were written for a single process."""

from __future__ import annotations

import sys

import tensorflow as tf

from estimator_ext import _tf_estimator
from estimator_ext._tf_private import DIVIDE_LOSSES, caller_of
from estimator_ext.errors import UnsupportedError
from estimator_ext.strategy.strategy import HostOffloadStrategy

_log = tf.get_logger()


class StrategyOfRanks(HostOffloadStrategy):
    """A strategy for programs that were written for a single process.

    Gradients are reduced to those of one process, which is what functions of TensorFlow and Keras
    get that divide a loss by the number of ranks. If the program itself reads this number,
    optimizers reduce as under any strategy.

    Args:
      loss_is: "mean" or "sum" if the user says what the losses are; if empty, their graphs do.
    """

    def __init__(self, auto_shard: str, loss_is: str = "") -> None:
        super().__init__(auto_shard=auto_shard)
        self.extended.reduces_at_backward = True
        self.extended.loss_is = loss_is

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of ranks; 1 for a function that divides a loss by it."""
        size, reduction = int(self.extended._num_replicas_in_sync), self.extended.reduction
        function, place, is_library = caller_of(sys._getframe(1))
        if size == 1 or reduction.model_knows_size:
            return size
        divides = function in DIVIDE_LOSSES or function in _tf_estimator.DIVIDE_LOSSES
        if divides and reduction.follows_gradients:
            reduction.has_divided = True
            return 1
        if is_library:
            return size
        if reduction.has_divided:
            raise UnsupportedError(
                f"the program reads num_replicas_in_sync in {place}, after a loss was computed as "
                "in one process. Read it before the loss, or not at all"
            )
        reduction.model_knows_size = place
        text = "the program reads the number of %d ranks in %s: optimizers reduce gradients as "
        _log.info(text + "under any strategy", size, place)
        return size
