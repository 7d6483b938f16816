"""Reductions of a training graph, built together when all of them are known.

While a model_fn runs, each reduction is only noted: its result is a stand-in that passes this
rank's value on. When the whole step is there, reductions that do not depend on each other are
built as one, and the stand-ins pass the results on instead:

    [R1] each operation of the step gets a level: how many reductions come before it, one after
         the other
    [R2] what is the same on all ranks needs no reduction
    [R3] the reductions of one level become one exchange, beside the buckets of large gradients
    [R4] reductions that are not part of the step become one each; who fetches them is unknown

So a step has as few exchanges as its longest chain of reductions, all ranks make them in the same
order, and the step of every rank contains all of them, even if one rank alone shows a result in
its summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.unique_rows import replace_tensor, skip_deduplication
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.ops import Flags
from hostopt.tensorflow.reductions import (
    AnyReducer,
    Reduction,
    reduce_together,
    share_an_exchange,
)

__all__: list[str] = []

STAND_IN = "HostReduced"


@dataclass(frozen=True, eq=False)
class _Deferred:
    """A reduction that is to be built.

    Args:
      reduction: what is reduced.
      stand_ins: the operations that pass on the result, one for each tensor of the value.
      weight: by what this rank's gradients are multiplied; None for 1.
      nonfinite: what follows if the result is not finite; None as the option says.
    """

    reduction: Reduction
    stand_ins: tuple[tf.Operation, ...]
    weight: tf.Tensor | None
    nonfinite: str | None

    @property
    def sources(self) -> list[tf.Operation]:
        """The operations that make this rank's value."""
        return [tensor.op for tensor in _parts(self.reduction.value)]


class DeferredReductions:
    """The reductions of one graph.

    Args:
      communicator: the ring.
      graph: the training graph.
      flags: travel with the last exchange of a step, if it has one.
    """

    def __init__(self, communicator: hostopt.Communicator, graph: tf.Graph, flags: Flags) -> None:
        self._communicator = communicator
        self._graph = graph
        self._flags = flags
        self._noted: list[_Deferred] = []
        self.last_results: list[tf.Tensor] = []  # available once all of a step's have been made
        self.loss: tf.Tensor | None = None  # the reduced one, if it was part of an exchange

    def can_take(self, values: Sequence[Any]) -> bool:
        """Whether reductions of these tensors can be built later.

        Args:
          values: tensors and sparse gradients.

        Returns:
          False within a branch, a loop or a function, which has a graph or a context of its own.
        """
        graph = tf.compat.v1.get_default_graph()
        return (
            graph is self._graph
            and graph._get_control_flow_context() is None
            and all(
                part.graph is graph and part.op._get_control_flow_context() is None
                for value in values
                for part in _parts(value)
            )
        )

    def add(
        self, reduction: Reduction, weight: tf.Tensor | None = None, nonfinite: str | None = None
    ) -> Any:
        """Notes a reduction.

        Args:
          reduction: what is reduced, whose name may have been given to another one already.
          weight: scalar of float64 by which a gradient of this rank is multiplied, if not 1.
          nonfinite: as for `hostopt.nonfinite.NonFiniteCheck`.

        Returns:
          Tensor or sparse gradient like the reduction's value, on the host: the result.
        """
        value, names = reduction.value, {each.reduction.name for each in self._noted}
        if reduction.name in names:
            numbered = (f"{reduction.name}#{number}" for number in range(2, len(names) + 3))
            name = next(each for each in numbered if each not in names)
            reduction = Reduction(
                value, name, reduction.op, reduction.is_gradient, reduction.row_shape
            )
        with tf.device(HOST_DEVICE), tf.name_scope(""):
            if isinstance(value, tf.IndexedSlices):
                # the number of rows is another one than this rank's
                indices = _stand_in(value.indices, [None])
                values = _stand_in(value.values, [None, *reduction.row_shape])
                result: Any = tf.IndexedSlices(values, indices, value.dense_shape)
            else:
                result = _stand_in(value, value.shape)
        stand_ins = tuple(tensor.op for tensor in _parts(result))
        self._noted.append(_Deferred(reduction, stand_ins, weight, nonfinite))
        return result

    def build(
        self,
        targets: Sequence[tf.Operation],
        is_same: Callable[[tf.Tensor], bool],
        loss: Reduction,
    ) -> list[AnyReducer]:
        """Builds all reductions that have been noted; all ranks call this together.

        Args:
          targets: what runs in each step.
          is_same: whether all ranks have the same value of a tensor.
          loss: joins the last exchange of the step, if there is one.

        Returns:
          What reduces, to be closed when the graph is done.

        Raises:
          hostopt.ConfigError: a tensor cannot be reduced.
          hostopt.CollectiveMismatchError: two ranks reduce different tensors.
        """
        noted, self._noted = self._noted, []
        needed = [each for each in noted if not self._pass_on(each, is_same)]  # [R2]
        in_step = _levels(targets, needed)  # [R1]
        levels = range(max(in_step.values(), default=-1) + 1)
        groups = [
            group
            for level in levels
            for group in _groups([each for each in needed if in_step.get(each) == level])
        ]
        reducers: list[AnyReducer] = []
        for number, group in enumerate(groups):  # [R3]
            reducers += self._reduce(group, [loss] if number == len(groups) - 1 else [])
        for each in needed:
            if each not in in_step:
                reducers += self._reduce([each], None)  # [R4]
        return reducers

    def _pass_on(self, deferred: _Deferred, is_same: Callable[[tf.Tensor], bool]) -> bool:
        reduction = deferred.reduction
        if reduction.is_gradient or reduction.op is not hostopt.ReduceOp.AVERAGE:
            return False
        return is_same(reduction.value)

    def _reduce(
        self, group: Sequence[_Deferred], also: Sequence[Reduction] | None
    ) -> list[AnyReducer]:
        """Builds the reductions of a group, and of the loss; `also` is None outside the step."""
        nonfinite = next((e.nonfinite for e in group if e.reduction.is_gradient), None)
        weight = next((e.weight for e in group if e.reduction.is_gradient), None)
        reductions = [each.reduction for each in group]
        flags = None
        if also and share_an_exchange(reductions, self._communicator):
            reductions, flags = [*reductions, *also], self._flags
            flags.travel = True
        results, reducers = reduce_together(
            reductions, self._communicator, weight, nonfinite, flags
        )
        for each, result in zip(group, results):
            for stand_in, part in zip(each.stand_ins, _parts(result)):
                _replace(stand_in, part)
            if each.reduction.is_sparse:
                skip_deduplication(result)
        if len(results) > len(group):
            self.loss = results[-1]
        if also is not None:
            self.last_results += [_parts(result)[0] for result in results]
        return reducers


def _parts(value: Any) -> list[tf.Tensor]:
    return [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]


def _stand_in(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape, name=STAND_IN)


def _replace(stand_in: tf.Operation, result: tf.Tensor) -> None:
    """Has a result used in place of a stand-in; who fetches the stand-in gets it too."""
    replace_tensor(stand_in.outputs[0], result)
    stand_in._update_input(0, result)


def _levels(
    targets: Sequence[tf.Operation], deferred: Sequence[_Deferred]
) -> dict[_Deferred, int]:
    """The level of each reduction that runs with the targets."""
    by_stand_in = {op: each for each in deferred for op in each.stand_ins}
    levels: dict[tf.Operation, int] = {}
    todo = list(targets)
    while todo:
        op = todo[-1]
        before = by_stand_in[op].sources if op in by_stand_in else _runs_before(op)
        left = [each for each in before if each not in levels]
        if left and op not in levels:
            todo += left
            continue
        todo.pop()
        if op not in levels:
            level = max((levels[each] for each in before), default=0)
            levels[op] = level + (op in by_stand_in)
    return {by_stand_in[op]: level - 1 for op, level in levels.items() if op in by_stand_in}


def _runs_before(op: tf.Operation) -> Collection[tf.Operation]:
    if op.type in ("NextIteration", "RefNextIteration"):  # its loop is reached from its beginning
        return ()
    return {*(tensor.op for tensor in op.inputs), *op.control_inputs}


def _groups(members: Sequence[_Deferred]) -> list[list[_Deferred]]:
    """Gradients of one weight and one check in one group; what is no gradient is in the first."""
    groups: dict[Any, list[_Deferred]] = {}
    for each in members:
        if each.reduction.is_gradient:
            weight = None if each.weight is None else each.weight.ref()
            groups.setdefault((weight, each.nonfinite), []).append(each)
    rest = [each for each in members if not each.reduction.is_gradient]
    found = list(groups.values()) or [[]]
    found[0] += rest
    return [group for group in found if group]
