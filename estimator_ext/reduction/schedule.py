"""The order in which the deferred reductions of a training graph are made.

    [R1] Each operation of the step gets a level: the length of the longest chain of reductions
         before it. A reduction has the level of its source.
    [R2] The mean of a mirrored variable, or of a reduced value, needs no reduction.
    [R3] The reductions of one level become one exchange, besides the buckets of large gradients.
    [R4] A value that is not a gradient is reduced in every step, even if nothing in the step uses
         the result: a hook of one rank may fetch it, and must not wait for the other ranks. It
         gets a separate exchange.
    [R5] All other reductions become one exchange each, and the step does not make them. They are
         for hooks that run them on all ranks in the same steps. They are gradients that the step
         does not use, and values whose computation would change state that the step does not
         change.

So a step has as few exchanges as its longest chain of reductions, in one order on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import is_reference
from estimator_ext.graphs.operation_kinds import VARIABLES
from estimator_ext.graphs.walks import LOOPS_BACK, operations_before, runs_before, walk
from hostopt.tensorflow.ops import is_same_on_all_ranks
from hostopt.tensorflow.reductions import Reduction
from hostopt.tensorflow.sparse import parts_of

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
    entries = _entries_of_loops(targets)

    def before(op: tf.Operation) -> Collection[tf.Operation]:
        each = by_stand_in.get(op)
        return {*_runs_before(op, entries), *(each.sources if each else ())}

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


def _runs_before(
    op: tf.Operation, entries: dict[bytes, list[tf.Operation]]
) -> Collection[tf.Operation]:
    if op.type in LOOPS_BACK:  # ends a loop, which is entered at its beginning
        return ()
    before = set(runs_before(op))
    if op.type in _MERGES:
        first = op.inputs[0].op
        if first.type in _ENTRIES:
            before |= set(entries[first.get_attr("frame_name")])
    return before


def _entries_of_loops(targets: Sequence[tf.Operation]) -> dict[bytes, list[tf.Operation]]:
    entries: dict[bytes, list[tf.Operation]] = {}
    for op in targets[0].graph.get_operations() if targets else ():
        if op.type in _ENTRIES:
            entries.setdefault(op.get_attr("frame_name"), []).append(op)
    return entries


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
