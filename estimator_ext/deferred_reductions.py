"""Reductions of a training graph, built together when all of them are known.

While a model_fn runs, each reduction is only noted: its result is a stand-in that passes this
rank's value on. When the whole step is there, reductions that do not depend on each other are
built as one, and the stand-ins pass the results on instead:

    [R1] each operation of the step gets a level: how many reductions come before it, one after
         the other
    [R2] the mean of a mirrored variable, or of what is reduced already, needs no reduction
    [R3] the reductions of one level become one exchange, beside the buckets of large gradients
    [R4] what is no gradient is reduced in every step, in an exchange of its own if nothing in the
         step uses it: a hook of one rank may fetch the result, and no rank waits for another
    [R5] what is left becomes one exchange each, for hooks that run it on all ranks in the same
         steps: gradients that the step does not use, and values whose computation would change
         something that the step does not change

So a step has as few exchanges as its longest chain of reductions, all ranks make them in the same
order, and the step of every rank contains all of them, even if one rank alone shows a result in
its summaries.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.graph import LOOPS_BACK, operations_before, runs_before
from estimator_ext.operation_kinds import VARIABLES
from estimator_ext.unique_rows import are_only_summed, replace_tensor, skip_deduplication
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.ops import Flags, is_same_on_all_ranks
from hostopt.tensorflow.reductions import (
    AnyReducer,
    Reduction,
    reduce_together,
    share_an_exchange,
)

__all__: list[str] = []

STAND_IN = "HostReduced"
_REFUSED = "HostReducedGradient"


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
        self._names: Counter[str] = Counter()  # how often each name was given
        self._built: list[tf.Tensor] = []  # results of reductions that could not be noted
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
        value = reduction.value
        reduction = dataclasses.replace(reduction, name=self._unique(reduction.name))
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

    def add_built(self, result: tf.Tensor) -> None:
        """Notes a reduction that was built at once, as its shape is not known.

        Args:
          result: of a tensor that is no gradient, outside of branches and loops.
        """
        self._built.append(result)

    def refuse_before(self, repeated: Sequence[tf.Operation]) -> None:
        """Makes sure that no reduction runs for each micro-batch, with data that may end.

        Args:
          repeated: what runs for each micro-batch.

        Raises:
          hostopt.ConfigError: one does. The ranks learn once a step whether their data have ended.
        """
        before = operations_before(repeated)
        values = [(op, each.reduction.name) for each in self._noted for op in each.stand_ins]
        values += [(result.op, result.op.name) for result in self._built]
        for op, name in values:
            if op in before:
                raise hostopt.ConfigError(
                    f"{name!r} is reduced over the ranks for each of the micro-batches of "
                    "accumulate_steps, but the data of a rank may end within a step. Make the "
                    "data endless with repeat(), or leave accumulate_steps out"
                )

    def _unique(self, name: str) -> str:
        self._names[name] += 1
        count = self._names[name]
        return name if count == 1 else self._unique(f"{name}#{count}")

    def build(
        self,
        targets: Sequence[tf.Operation],
        is_same: Callable[[tf.Tensor], bool],
        loss: Reduction,
        repeated: Sequence[tf.Operation] = (),
    ) -> list[AnyReducer]:
        """Builds all reductions that have been noted; all ranks call this together.

        Args:
          targets: what runs in each step.
          is_same: whether all ranks have the same value of a tensor.
          loss: joins the last exchange of the step, if there is one that it does not depend on.
          repeated: what runs more often than the step, for each of its micro-batches.

        Returns:
          What reduces, to be closed when the graph is done.

        Raises:
          hostopt.ConfigError: a tensor cannot be reduced.
          hostopt.CollectiveMismatchError: two ranks reduce different tensors.
        """
        noted, self._noted = self._noted, []
        needed = [  # [R2]
            _with_kind_of_rows(each) for each in noted if not _needs_no_reduction(each, is_same)
        ]
        targets = [*targets, *self._shown_by_others(targets, needed)]
        unused = _unused(targets, needed, self._built)  # [R4]
        self.last_results += unused.built
        all_targets = [*targets, *(op for each in unused.deferred for op in each.stand_ins)]
        in_step, before = _levels([*all_targets, loss.value.op], needed)  # [R1]
        often = operations_before(repeated)
        kinds = {
            each: _kind(each, unused.deferred.get(each), not often.isdisjoint(each.stand_ins))
            for each in in_step
        }
        ordered = sorted({(level, kinds[each]) for each, level in in_step.items()})
        groups = [
            (level, kind, group)
            for level, kind in ordered
            for group in _groups(
                [e for e, at in in_step.items() if (at, kinds[e]) == (level, kind)]
            )
        ]
        last = max((i for i, (_, kind, _) in enumerate(groups) if kind == _OF_STEP), default=-1)
        if last >= 0 and before[loss.value.op] > groups[last][0]:
            last = -1  # the loss is made of what travels last
        reducers: list[AnyReducer] = []
        for number, (_, _, group) in enumerate(groups):  # [R3]
            reducers += self._reduce(group, [loss] if number == last else [])
        for each in needed:
            if each not in in_step:
                reducers += self._reduce([each], None)  # [R5]
        return reducers

    def _shown_by_others(
        self, targets: Sequence[tf.Operation], deferred: Sequence[_Deferred]
    ) -> list[tf.Operation]:
        """What another rank uses in its step, and this rank does not."""
        values = {each.reduction.name: each for each in deferred if not each.reduction.is_gradient}
        if not values:
            return []
        used = operations_before(targets)
        own = [name for name, each in values.items() if not used.isdisjoint(each.stand_ins)]
        texts = self._communicator.all_gather_bytes(
            json.dumps(own).encode(), "the reductions that the ranks use in a step"
        )
        names = dict.fromkeys(name for text in texts for name in json.loads(text))
        return [op for name in names if name in values for op in values[name].stand_ins]

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
            if each.reduction.is_sparse and each.reduction.sums_rows:
                skip_deduplication(result)
        if len(results) > len(group):
            self.loss = results[-1]
        if also is not None:
            self.last_results += [_parts(result)[0] for result in results]
        return reducers


def _parts(value: Any) -> list[tf.Tensor]:
    return [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]


def _stand_in(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    # what is no gradient has a gradient of its own, around the stand-in
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"PlaceholderWithDefault": _REFUSED}):
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape, name=STAND_IN)


@tf.RegisterGradient(_REFUSED)
def _refuse(op: tf.Operation, grad: tf.Tensor) -> Any:
    del grad
    raise hostopt.ConfigError(
        f"a loss is differentiated through {op.inputs[0].op.name!r}, a gradient that is reduced "
        "over the ranks. Differentiate before reducing, or use tf.stop_gradient"
    )


def _replace(stand_in: tf.Operation, result: tf.Tensor) -> None:
    """Has a result used in place of a stand-in; who fetches the stand-in gets it too."""
    replace_tensor(stand_in.outputs[0], result)
    stand_in._update_input(0, result)


def _with_kind_of_rows(deferred: _Deferred) -> _Deferred:
    """A reduction that sums rows of one index of a sparse gradient, if that changes nothing."""
    reduction = deferred.reduction
    if not reduction.is_sparse:
        return deferred
    sums_rows = are_only_summed(*(op.outputs[0] for op in deferred.stand_ins))
    reduction = dataclasses.replace(reduction, sums_rows=sums_rows)
    return dataclasses.replace(deferred, reduction=reduction)


def _needs_no_reduction(deferred: _Deferred, is_same: Callable[[tf.Tensor], bool]) -> bool:
    """Whether a mean is the value itself: of a mirrored variable, or of another reduction.

    A constant that is the same on all ranks as far as the graph shows may differ, as may all that
    is computed with one: the program may have made it of this rank's data.
    """
    reduction = deferred.reduction
    if reduction.is_gradient or reduction.op is not hostopt.ReduceOp.AVERAGE:
        return False
    op = reduction.value.op
    while op.type in ("Identity", "ReadVariableOp"):
        op = op.inputs[0].op
    is_kept = op.type in VARIABLES or is_same_on_all_ranks(op)
    return is_kept and is_same(reduction.value)


@dataclass(frozen=True)
class _Unused:
    """Reductions that nothing in the step uses, and that it can make nevertheless.

    Args:
      deferred: those that were noted, each with what changes state if it is computed.
      built: results of those that have been built.
    """

    deferred: dict[_Deferred, frozenset[tf.Operation]]
    built: list[tf.Tensor]


def _unused(
    targets: Sequence[tf.Operation],
    deferred: Sequence[_Deferred],
    built: Sequence[tf.Tensor],
) -> _Unused:
    used = operations_before(targets)
    changes = {op for op in used if _changes_state(op)}
    left = {
        op
        for each in deferred
        if each.reduction.is_gradient and used.isdisjoint(each.stand_ins)
        for op in each.stand_ins
    }

    def changed_by(operations: Collection[tf.Operation]) -> frozenset[tf.Operation] | None:
        """What changes state if these run; None if the step runs them already, or must not."""
        if not used.isdisjoint(operations):
            return None
        before = operations_before(operations)
        own = frozenset(op for op in before if _changes_state(op))
        return own if own <= changes and left.isdisjoint(before) else None

    found = _Unused({}, [])
    for each in deferred:
        own = None if each.reduction.is_gradient else changed_by(each.stand_ins)
        if own is not None:
            found.deferred[each] = own
    found.built.extend(result for result in built if changed_by([result.op]) is not None)
    return found


# Stateful operations that may run once more, or in one more step, without changing a result.
_HARMLESS = re.compile(
    r"VarHandleOp|VariableV2|Variable|ReadVariableOp|ResourceGather(Nd)?|VariableShape"
    r"|VarIsInitializedOp|IsVariableInitialized|.*(Random|Normal|Multinomial).*|StatefulUniform.*"
    r"|.*Placeholder.*|(Eager)?PyFunc|Print(V2)?|Assert|.*HashTable(V2)?|LookupTable(Find|Size).*"
    r"|(Tensor|Map)Dataset|DatasetToSingleElement|Identity|Switch|RefSwitch|Enter|RefEnter"
)


def _changes_state(op: tf.Operation) -> bool:
    """Whether an operation may change a variable, a queue or how far data are read."""
    takes_reference = any(tensor.dtype._is_ref_dtype for tensor in op.inputs)
    return (op.op_def.is_stateful or takes_reference) and not _HARMLESS.fullmatch(op.type)


_OF_STEP = ""  # the first kind


def _kind(deferred: _Deferred, changes: frozenset[tf.Operation] | None, is_repeated: bool) -> str:
    """Reductions of one kind may share an exchange: who fetches one may compute the others too."""
    if is_repeated:
        return "repeated"
    if changes is None:
        return _OF_STEP
    return ", ".join(sorted(["unused", *(op.name for op in changes)]))


def _levels(
    targets: Sequence[tf.Operation], deferred: Sequence[_Deferred]
) -> tuple[dict[_Deferred, int], dict[tf.Operation, int]]:
    """The level of each reduction, and how many come before each operation, of all that runs."""
    by_stand_in = {op: each for each in deferred for op in each.stand_ins}
    entries = _entries_of_loops(targets)
    in_step: dict[_Deferred, int] = {}
    levels: dict[tf.Operation, int] = {}
    todo = list(targets)
    while todo:
        op = todo[-1]
        each = by_stand_in.get(op)
        before = {*_runs_before(op, entries), *(each.sources if each else ())}
        left = [other for other in before if other not in levels]
        if left and op not in levels:
            todo += left
            continue
        todo.pop()
        if op not in levels:
            levels[op] = max((levels[other] for other in before), default=0)
            if each is not None:
                in_step[each] = max(levels[source] for source in each.sources)
                levels[op] = max(levels[op], in_step[each] + 1)
    # in the order in which they were noted, as on the other ranks
    return {each: in_step[each] for each in deferred if each in in_step}, levels


def _runs_before(
    op: tf.Operation, entries: dict[bytes, list[tf.Operation]]
) -> Collection[tf.Operation]:
    if op.type in LOOPS_BACK:  # its loop is reached from its beginning
        return ()
    before = set(runs_before(op))
    if op.type in ("Merge", "RefMerge"):  # what the body of a loop uses is there before it begins
        first = op.inputs[0].op
        if first.type in _ENTRIES:
            before |= set(entries[first.get_attr("frame_name")])
    return before


_ENTRIES = ("Enter", "RefEnter")


def _entries_of_loops(targets: Sequence[tf.Operation]) -> dict[bytes, list[tf.Operation]]:
    """What comes into each loop of TensorFlow 1, by its name."""
    entries: dict[bytes, list[tf.Operation]] = {}
    for op in targets[0].graph.get_operations() if targets else ():
        if op.type in _ENTRIES:
            entries.setdefault(op.get_attr("frame_name"), []).append(op)
    return entries


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
