"""Reduces gradients to those of one process, by the kinds of their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.losses.kind import LossKind
from estimator_ext.reduction.gradient_marks import Mark, marked_graph
from estimator_ext.reduction.value_reduction import ValueReduction
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.sparse import map_values

_log = tf.get_logger()


class MarkedGradients:
    """The gradients of one graph whose losses are known.

    Args:
      size: number of ranks.
      sum_gradients: that of `GradientReduction`.
      values: reductions of other tensors of the graph.
    """

    def __init__(
        self, size: int, sum_gradients: Callable[..., list[Any]], values: ValueReduction
    ) -> None:
        self._size = size
        self._sum_gradients = sum_gradients
        self._values = values
        self._losses: dict[LossKind, None] = {}  # whose gradients are reduced

    def reduce(
        self,
        gradients: Sequence[tuple[Any, str, tuple[int, ...]]],
        marks: Sequence[Mark],
        nonfinite: str | None = None,
        device: str = HOST_DEVICE,
    ) -> list[Any]:
        """Reduces gradients to their mean over the ranks, or to the sum if their loss is a sum.

        Args:
          device: device of the results, unless they are sums.

        Returns:
          The results, in the order of `gradients`.

        Raises:
          hostopt.ConfigError: a loss is neither a mean nor a sum.
        """
        for mark in dict.fromkeys(marks):
            self._check(mark)
        kinds = [(mark.loss.is_sum, mark.is_scaled) for mark in marks]
        results: list[Any] = [None] * len(marks)
        for is_sum, is_scaled in sorted(set(kinds)):
            chosen = [i for i, kind in enumerate(kinds) if kind == (is_sum, is_scaled)]
            sums = self._sum_gradients([gradients[i] for i in chosen], not is_sum, nonfinite)
            if not (is_sum or is_scaled):
                with tf.device(device):
                    sums = [map_values(lambda each: each / self._size, total) for total in sums]
            for i, total in zip(chosen, sums):
                results[i] = total
        return results

    def _check(self, mark: Mark) -> None:
        graph, loss = marked_graph(), mark.loss
        if loss.problem and self._size > 1:
            text, remedy = loss.problem
            raise hostopt.ConfigError(
                f"{self._size} ranks are to train like one process, but a loss {text}. {remedy}"
            )
        if graph is not None:
            graph.divide_penalties(loss, self._values.share)
        self._losses[loss] = None

    def decide(self, loss: tf.Tensor, is_mean: bool) -> bool:
        """Decides how the reported loss is reduced, and logs what is a mean and what is a sum.

        Args:
          loss: the loss of the step, in the default graph.
          is_mean: the decision if no gradient was reduced here.

        Returns:
          True for the mean over the ranks, False for the sum.
        """
        for each in self._losses if self._size > 1 else ():
            kind = "sum" if each.is_sum else "mean"
            text = "gradients are the %s over %d ranks, as the loss is a %s over the batch: %s"
            log = _log.warning if each.is_assumed else _log.info
            log(text, kind, self._size, kind, each.reason)
        graph = marked_graph()
        if graph is None or not self._losses:
            return is_mean
        reported = graph.loss_kind([loss])
        graph.divide_penalties(reported, self._values.share)
        return not reported.is_sum
