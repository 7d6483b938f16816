"""Reductions of a training graph, built together when all of them are known.

While a model_fn runs, each reduction is only noted. Its result is a stand-in that passes on this
rank's value. When the graph of the step is complete, the reductions are grouped into as few
exchanges as possible, and the stand-ins are replaced by their results:

    [R1] Each operation of the step gets a level: the length of the longest chain of reductions
         before it. A reduction has the level of its source.
    [R2] The mean of a mirrored variable, or of a reduced value, needs no reduction.
    [R3] The reductions of one level become one exchange, besides the buckets of large gradients.
    [R4] A value that is not a gradient is reduced in every step. If nothing in the step uses it,
         it has a separate exchange: a hook of one rank may fetch it, and must not wait for others.
    [R5] All others become one exchange each, which the step does not make: gradients that it does
         not use, and values whose computation would change state that it does not change. They
         are for hooks that run them on all ranks in the same steps.

So a step has as few exchanges as its longest chain of reductions, in one order on all ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    control_flow_context,
    is_reference,
    replace_input,
    replace_tensor,
)
from estimator_ext.graphs.operation_kinds import VARIABLES
from estimator_ext.graphs.walks import LOOPS_BACK, operations_before, runs_before, walk
from hostopt.collectives.communicator import all_gather_json
from hostopt.gradients.reducer import AnyReducer
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.ops import StopSaveFlags, is_same_on_all_ranks
from hostopt.tensorflow.reductions import Reduction, can_join, reduce_tensors
from hostopt.tensorflow.sparse import parts_of

STAND_IN = "HostReduced"
_REFUSED = "HostReducedGradient"
# Sums by index, and operations that are linear in each row.
_SUMS = re.compile(r"UnsortedSegmentSum|(Resource)?Scatter(Nd)?(Add|Sub)")
_LINEAR = re.compile(r"Neg|Identity|Cast|Reshape|Mul|RealDiv")
_IRRELEVANT = ("Shape", "IsFinite")
_ENTRIES = ("Enter", "RefEnter")
_MERGES = ("Merge", "RefMerge")
# Stateful operations that may run once more, or in one more step, without changing a result.
_HARMLESS = re.compile(
    r"VarHandleOp|VariableV2|Variable|ReadVariableOp|ResourceGather(Nd)?|VariableShape"
    r"|VarIsInitializedOp|IsVariableInitialized|.*(Random|Normal|Multinomial).*|StatefulUniform.*"
    r"|.*Placeholder.*|(Eager)?PyFunc|Print(V2)?|Assert|.*HashTable(V2)?|LookupTable(Find|Size).*"
    r"|(Tensor|Map)Dataset|DatasetToSingleElement|Identity|Switch|RefSwitch|Enter|RefEnter"
)
# Kinds of reductions, each with its own exchanges. The kind of the step comes first in the order.
_OF_STEP, _REPEATED = "", "repeated"


@dataclass(frozen=True, eq=False)
class Deferred:
    """A reduction that is built at the end of the graph."""

    reduction: Reduction
    # one for each tensor of the value; they pass on the result
    stand_ins: tuple[tf.Operation, ...]
    weight: tf.Tensor | None  # scalar of float64, of this rank's gradients; None for 1
    nonfinite: str | None  # reaction to NaN and Inf; None for that of the option

    @property
    def sources(self) -> list[tf.Operation]:
        """The operations that compute this rank's value."""
        return [tensor.op for tensor in parts_of(self.reduction.value)]


@dataclass(eq=False)
class DeferredReductions:
    """The reductions of one graph."""

    strategy: Any
    graph: tf.Graph | None  # None if nothing is noted
    flags: StopSaveFlags
    built: list[tf.Tensor] = field(default_factory=list)  # at once; their shapes are not static
    last_results: list[tf.Tensor] = field(default_factory=list)  # after all reductions of a step
    # of dense tensors, by the names in the buckets of reducers
    sums: dict[str, tf.Tensor] = field(default_factory=dict)
    gradients: list[tf.Tensor] = field(default_factory=list)  # sums of gradients
    loss: tf.Tensor | None = None  # the reduced loss, if it travels with another reduction
    _is_built: bool = False
    _deferred: list[Deferred] = field(default_factory=list)
    _names: Counter[str] = field(default_factory=Counter)  # number of reductions of each name

    def can_take(self, values: Sequence[Any]) -> bool:
        """Returns True before `build`, for tensors outside branches, loops and functions."""
        graph = tf.compat.v1.get_default_graph()
        return (
            not self._is_built
            and graph is self.graph
            and control_flow_context(graph) is None
            and all(
                part.graph is graph and control_flow_context(part.op) is None
                for value in values
                for part in parts_of(value)
            )
        )

    def add(
        self, reduction: Reduction, weight: tf.Tensor | None = None, nonfinite: str | None = None
    ) -> Any:
        """Notes a reduction."""
        value = reduction.value
        reduction = replace(reduction, name=self._unique(reduction.name))
        with tf.device(HOST_DEVICE), tf.name_scope(""):
            if isinstance(value, tf.IndexedSlices):
                # the result may have more rows than this rank's value
                indices = _stand_in(value.indices, [None])
                values = _stand_in(value.values, [None, *reduction.row_shape])
                result: Any = tf.IndexedSlices(values, indices, value.dense_shape)
            else:
                result = _stand_in(value, value.shape)
        stand_ins = tuple(tensor.op for tensor in parts_of(result))
        self._deferred.append(Deferred(reduction, stand_ins, weight, nonfinite))
        return result

    def refuse_before(self, repeated: Sequence[tf.Operation]) -> None:
        """Checks that no reduction runs for each micro-batch, if batches have weights.

        The ranks exchange the weights, and whether their data have ended, once per step.
        """
        before = operations_before(repeated)
        values = [(op, each.reduction.name) for each in self._deferred for op in each.stand_ins]
        values += [(result.op, result.op.name) for result in self.built]
        for op, name in values:
            if op in before:
                raise hostopt.ConfigError(
                    f"{name!r} is reduced over the ranks for each of the micro-batches of "
                    "accumulate_steps, but the data of a rank may end within a step, or batches "
                    "differ in length. Make the data endless, with repeat() before batch(), or "
                    "leave accumulate_steps out"
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
        """Builds all noted reductions; collective."""
        self._is_built = True
        deferred = [  # [R2]
            _with_kind_of_rows(each)
            for each in self._deferred
            if not needs_no_reduction(each.reduction, is_same)
        ]
        targets = [*targets, *self._used_by_any_rank(targets, deferred)]
        schedule = make_schedule(targets, deferred, self.built, loss.value.op, repeated)
        self.last_results += schedule.unused
        reducers: list[AnyReducer] = []
        for index, group in enumerate(schedule.groups):  # [R3]
            results, made = self._reduce(group, loss if index == schedule.with_loss else None)
            self.last_results += [parts_of(result)[0] for result in results]
            reducers += made
        for each in schedule.outside:  # [R5]
            reducers += self._reduce([each])[1]
        return reducers

    def _used_by_any_rank(
        self, targets: Sequence[tf.Operation], deferred: Sequence[Deferred]
    ) -> list[tf.Operation]:
        values = {each.reduction.name: each for each in deferred if not each.reduction.is_gradient}
        if not values:
            return []
        used = operations_before(targets)
        names = [name for name, each in values.items() if not used.isdisjoint(each.stand_ins)]
        text = "the reductions that the ranks use in a step"
        of_ranks = all_gather_json(self.strategy.communicator, names, text)
        of_all = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
        return [op for name in of_all if name in values for op in values[name].stand_ins]

    def _reduce(
        self, group: Sequence[Deferred], loss: Reduction | None = None
    ) -> tuple[list[Any], list[AnyReducer]]:
        nonfinite = next((e.nonfinite for e in group if e.reduction.is_gradient), None)
        weight = next((e.weight for e in group if e.reduction.is_gradient), None)
        reductions = [each.reduction for each in group]
        flags = None
        if loss is not None and can_join(loss, reductions, self.strategy.communicator):
            reductions, flags = [*reductions, loss], self.flags
            flags.travel = True
        results, reducers = reduce_tensors(
            reductions, self.strategy.communicator, weight, nonfinite, flags
        )
        for each, result in zip(group, results):
            if not each.reduction.is_sparse:
                self.sums[each.reduction.name] = result
            if each.reduction.is_gradient:
                self.gradients += parts_of(result)
            for stand_in, part in zip(each.stand_ins, parts_of(result)):
                replace_tensor(stand_in.outputs[0], part)
                replace_input(stand_in, 0, part)  # for hooks that fetch the stand-in
            if each.reduction.is_sparse and each.reduction.sums_rows:
                skip_deduplication(result)
        if flags is not None:
            self.loss = results[-1]
        return results, reducers


def is_stand_in(op: tf.Operation) -> bool:
    """Returns True for what a program gets in place of a reduced tensor."""
    return bool(op.type == "PlaceholderWithDefault" and op.name.startswith(STAND_IN))


def _stand_in(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    # a value that is not a gradient gets the gradient of `ValueReduction`, around the stand-in
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"PlaceholderWithDefault": _REFUSED}):
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape, name=STAND_IN)


@tf.RegisterGradient(_REFUSED)
def _refuse(op: tf.Operation, grad: tf.Tensor) -> Any:
    raise hostopt.ConfigError(
        f"a loss is differentiated through {op.inputs[0].op.name!r}, a gradient that is reduced "
        "over the ranks. Differentiate before reducing, or use tf.stop_gradient"
    )


# -- rows with the same index ----------------------------------------------------------------

# Optimizers of TensorFlow sum rows with the same index, by a Unique and an UnsortedSegmentSum for
# each table. If all consumers only make sums, the rows are summed before they travel, and the
# optimizers' sums are left out. Any other consumer needs all rows, such as a norm.


def _with_kind_of_rows(deferred: Deferred) -> Deferred:
    """Notes if the consumers of a sparse gradient only sum its rows by index."""
    if not deferred.reduction.is_sparse:
        return deferred
    values, indices = (op.outputs[0] for op in deferred.stand_ins)
    sums: set[tf.Operation] = set()
    sums_rows = _are_summed(values, sums) and _are_indices_of(indices, sums)
    return replace(deferred, reduction=replace(deferred.reduction, sums_rows=sums_rows))


def _are_summed(values: tf.Tensor, sums: set[tf.Operation]) -> bool:
    for op in values.consumers():
        if _SUMS.fullmatch(op.type):
            sums.add(op)
            continue
        if op.type in _IRRELEVANT:
            continue
        if not _LINEAR.fullmatch(op.type) or op.inputs[0] is not values:
            return False
        if any(each.shape.rank != 0 for each in op.inputs[1:] if op.type in ("Mul", "RealDiv")):
            return False  # the rows have different factors
        if not _are_summed(op.outputs[0], sums):
            return False
    return True


def _are_indices_of(indices: tf.Tensor, sums: Collection[tf.Operation]) -> bool:
    for op in indices.consumers():
        if op in sums or op.type in _IRRELEVANT:
            continue
        if op.type == "Unique" and all(each in sums for each in op.outputs[1].consumers()):
            continue
        if op.type not in ("Identity", "Cast") or not _are_indices_of(op.outputs[0], sums):
            return False
    return True


def skip_deduplication(rows: tf.IndexedSlices) -> None:
    """Connects the consumers of the optimizers' sums to the rows, when the step is built."""
    for unique in rows.indices.consumers():
        if unique.type != "Unique":
            continue
        indices, positions = unique.outputs
        for sums in positions.consumers():
            if sums.type == "UnsortedSegmentSum" and sums.inputs[0] is rows.values:
                replace_tensor(sums.outputs[0], rows.values)
        # an optimizer uses the number of indices, too
        replace_tensor(indices, rows.indices)


# -- the schedule ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The exchanges of a graph."""

    groups: list[list[Deferred]]  # one for each exchange of the step, in their order
    with_loss: int | None  # index of the group that the loss joins
    outside: list[Deferred]  # which the step does not make
    unused: list[tf.Tensor]  # results that are built already, and that the step makes for hooks


def make_schedule(
    targets: Sequence[tf.Operation],
    deferred: Sequence[Deferred],
    built: Sequence[tf.Tensor],
    loss: tf.Operation,
    repeated: Sequence[tf.Operation],
) -> Schedule:
    """Groups reductions into exchanges: [R1], [R3] to [R5]. Ranks with the same graph agree."""
    unused, unused_results = _unused(targets, deferred, built)  # [R4]
    stand_ins = [op for each in unused for op in each.stand_ins]
    in_step, levels = _levels([*targets, *stand_ins, loss], deferred)  # [R1]
    before_repeated = operations_before(repeated)
    # An exchange computes all of its inputs: reductions that run at other times, or whose inputs
    # change other state, must not share it.
    members: dict[tuple[int, str], list[Deferred]] = {}
    for each, level in in_step.items():
        kind = _OF_STEP
        if not before_repeated.isdisjoint(each.stand_ins):
            kind = _REPEATED
        elif each in unused:
            kind = ", ".join(sorted(["unused", *(op.name for op in unused[each])]))
        members.setdefault((level, kind), []).append(each)
    groups: list[list[Deferred]] = []  # [R3]
    with_loss, last_level = None, 0
    for level, kind in sorted(members):
        groups += _groups(members[level, kind])
        if kind == _OF_STEP:
            with_loss, last_level = len(groups) - 1, level
    if levels[loss] > last_level:
        with_loss = None  # the loss depends on the last exchange
    outside = [each for each in deferred if each not in in_step]  # [R5]
    return Schedule(groups, with_loss, outside, unused_results)


def needs_no_reduction(reduction: Reduction, is_same: Callable[[tf.Tensor], bool]) -> bool:
    """Returns True for the mean of a mirrored variable or of another reduction: [R2].

    A constant is not enough. It looks the same on all ranks in the graph, but the program may have
    made it of this rank's data.
    """
    if reduction.is_gradient or reduction.op is not hostopt.ReduceOp.AVERAGE:
        return False
    op = reduction.value.op
    while op.type in ("Identity", "ReadVariableOp"):
        op = op.inputs[0].op
    is_kept = op.type in VARIABLES or is_same_on_all_ranks(op)
    return is_kept and is_same(reduction.value)


def _unused(
    targets: Sequence[tf.Operation], deferred: Sequence[Deferred], built: Sequence[tf.Tensor]
) -> tuple[dict[Deferred, frozenset[tf.Operation]], list[tf.Tensor]]:
    """Finds reductions that nothing in the step uses, and that it can make nevertheless."""
    used = operations_before(targets)
    changes = {op for op in used if _changes_state(op)}
    unused_gradients = {
        op
        for each in deferred
        if each.reduction.is_gradient and used.isdisjoint(each.stand_ins)
        for op in each.stand_ins
    }

    def changed_by(operations: Collection[tf.Operation]) -> frozenset[tf.Operation] | None:
        """Returns what changes state; None if the step runs `operations` or must not run them."""
        if not used.isdisjoint(operations):
            return None
        before = operations_before(operations)
        changing = frozenset(op for op in before if _changes_state(op))
        is_allowed = changing <= changes and unused_gradients.isdisjoint(before)
        return changing if is_allowed else None

    values = [each for each in deferred if not each.reduction.is_gradient]
    changing_by = ((each, changed_by(each.stand_ins)) for each in values)
    unused = {each: changing for each, changing in changing_by if changing is not None}
    return unused, [result for result in built if changed_by([result.op]) is not None]


def _changes_state(op: tf.Operation) -> bool:
    is_stateful = op.op_def.is_stateful or any(map(is_reference, op.inputs))
    return is_stateful and not _HARMLESS.fullmatch(op.type)


def _levels(
    targets: Sequence[tf.Operation], deferred: Sequence[Deferred]
) -> tuple[dict[Deferred, int], dict[tf.Operation, int]]:
    by_stand_in = {op: each for each in deferred for op in each.stand_ins}
    entries: dict[bytes, list[tf.Operation]] = {}  # of loops
    for op in targets[0].graph.get_operations():
        if op.type in _ENTRIES:
            entries.setdefault(op.get_attr("frame_name"), []).append(op)

    def before(op: tf.Operation) -> Collection[tf.Operation]:
        if op.type in LOOPS_BACK:  # ends a loop, which is entered at its beginning
            return ()
        found = set(runs_before(op))
        if op.type in _MERGES and op.inputs[0].op.type in _ENTRIES:
            found.update(entries[op.inputs[0].op.get_attr("frame_name")])
        if op in by_stand_in:
            found.update(by_stand_in[op].sources)
        return found

    in_step: dict[Deferred, int] = {}
    levels: dict[tf.Operation, int] = {}
    for op in walk(targets, before):  # the end of a loop comes last, and has level 0
        levels[op] = max((levels.get(other, 0) for other in before(op)), default=0)
        each = by_stand_in.get(op)
        if each is not None:
            in_step[each] = max(levels[source] for source in each.sources)
            levels[op] = max(levels[op], in_step[each] + 1)
    # in the order in which they were noted, which all ranks share
    return {each: in_step[each] for each in deferred if each in in_step}, levels


def _groups(members: Sequence[Deferred]) -> list[list[Deferred]]:
    """Groups gradients by weight and check; other values join the first group."""
    groups: dict[Any, list[Deferred]] = {}
    for each in members:
        if each.reduction.is_gradient:
            weight = None if each.weight is None else each.weight.ref()
            groups.setdefault((weight, each.nonfinite), []).append(each)
    values = [each for each in members if not each.reduction.is_gradient]
    first, *others = groups.values() or [[]]
    return [group for group in ([*first, *values], *others) if group]
