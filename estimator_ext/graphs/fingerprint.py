"""Descriptions of the updates of a training step, which ranks can compare.

[F1] The operations of the step are read in topological order. Each is described by its type
     and the descriptions of its inputs. A description ends at variables, at sums over the
     ranks, and at values that depend on this rank's data or on random numbers, which may
     differ by rank. It contains no names of operations, as TensorFlow makes them up.
[F2] A value that is not known to be the same on all ranks counts as varying.
[F3] Values that are assigned to a variable, put into a queue, or passed on by the body of a
     loop are known only when all operations have been read. So the operations are read again
     until no other variable, queue or loop is found to vary.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import tensorflow as tf

from estimator_ext._tf_private import is_reference
from estimator_ext.graphs.operation_kinds import (
    OF_THIS_RANK,
    PASSING,
    READ_LATER,
    READS,
    arguments,
    depends_on_more,
    is_filled_elsewhere,
    makes_handle,
    takes_handle,
)
from estimator_ext.graphs.walks import (
    BRANCHES,
    CALLS,
    LOOPS,
    decided_before,
    functions_called,
    parameters,
    predicates_around,
    walk,
)
from estimator_ext.variables.sync_on_read import is_sync_on_read
from hostopt.tensorflow.ops import is_same_on_all_ranks

_SHOWN_CHARACTERS = 400

# The description of an operation; None if its values may differ by rank.
Text = Optional[str]
Tensors = Sequence[tf.Tensor]


def read_updates(
    targets: Sequence[tf.Operation],
    data: Collection[tf.Operation],
    reduced: Collection[tf.Operation] = (),
) -> Updates:
    """Reads the graph of a step.

    A variable counts as the same on all ranks if it is trainable, or if no value that depends on
    data or random numbers is assigned to it.
    """
    operations = walk(targets, decided_before)
    variables = tf.compat.v1.global_variables()
    trained = tf.compat.v1.trainable_variables()
    trainable = {variable.op.name for variable in trained}
    local_variables = tf.compat.v1.local_variables()
    initial = {v.op.name: _initial_text(v) for v in local_variables if v.op.name not in trainable}
    varying: set[Any] = {name for name, text in initial.items() if text is None}
    varying |= {v.op.name for v in variables if is_sync_on_read(v)}
    bodies: dict[tf.Operation, list[tuple[str, Any]]] = {}
    while True:  # [F3]
        updates = Updates(varying, data, reduced, set(operations), bodies)
        updates.read(operations)
        more = (updates.varying.keys() | updates.loops) - varying - trainable
        if not more:
            break
        varying |= more
    known = {variable.op.name: variable for variable in [*local_variables, *trained, *variables]}
    used = sorted(updates.used & known.keys() - varying)
    updates.mirrored = [known[name] for name in used]
    updates.texts = {n: "; ".join(sorted(e)) for n, e in updates.described.items() if n in known}
    updates.texts.update({f"{n} at first": text for n in used if (text := initial.get(n))})
    return updates


def _initial_text(variable: tf.Variable) -> Text:
    """Describes the initial value of a local variable, which ranks do not send to each other."""
    operations = walk([variable.initializer], decided_before)
    updates = Updates(set(), (), (), set(operations), {})
    updates.read(operations)
    name = variable.op.name
    return None if name in updates.varying else "; ".join(updates.described.get(name, ())) or None


@dataclass
class Updates:
    """The updates of a step. "Variable" stands for a queue or a table too."""

    local: set[Any]  # that may differ by rank: variables by name, and beginnings of loops
    data: Collection[tf.Operation]
    reduced: Collection[tf.Operation]
    step: Collection[tf.Operation]
    bodies: dict[tf.Operation, list[tuple[str, Any]]]  # graphs of the functions that each calls
    # what changes a variable, by its name; an operation in a function stands for its caller
    changes: dict[str, list[tf.Operation]] = field(default_factory=dict)
    varying: dict[str, list[tf.Operation]] = field(default_factory=dict)  # that make it differ
    # those that are built already, with the predicates that decide on them, the outermost first
    reductions: list[tuple[tf.Operation, list[tf.Tensor]]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    described: dict[str, list[str]] = field(default_factory=dict)  # changes of a variable
    loops: set[tf.Operation] = field(default_factory=set)  # found to vary
    texts: dict[str, str] = field(default_factory=dict)  # by name; also of initial local values
    mirrored: list[tf.Variable] = field(default_factory=list)
    _variables: dict[tf.Operation, str] = field(default_factory=dict)
    _texts: dict[tf.Operation, Text] = field(default_factory=dict)
    _results: dict[tf.Operation, list[Text]] = field(default_factory=dict)  # of calls

    def variable_of(self, op: tf.Operation) -> str | None:
        """Returns the name of the variable that an operation creates or passes on."""
        return self._variables.get(op)

    def is_same(self, tensor: tf.Tensor) -> bool:
        """Returns True if all ranks have the same value of a tensor that has been read."""
        return tensor.op in self._texts and self._text(tensor) is not None

    def read(
        self, operations: Iterable[tf.Operation], caller: Any = None, conditions: Tensors = ()
    ) -> None:
        """Describes operations, in topological order: [F1]."""
        loops = []
        for op in operations:
            if op in self._texts:  # an argument of a function
                continue
            if op.type in ("Merge", "RefMerge", "LoopCond"):
                loops.append(op)
            self._note_variable(op)
            decides = [*conditions, *predicates_around(op)]
            if op.type == "DatasetToSingleElement" and is_same_on_all_ranks(op):
                self.reductions.append((op, decides))
            self._texts[op] = self._describe(op, caller or op, decides)
            if op.type not in (*READS, *PASSING, *CALLS) and takes_handle(op):
                self._note_change(op, caller or op, decides)
        # the beginning of a loop is read before its end and before its condition
        self.loops |= {
            op
            for op in loops
            if None in map(self._text, op.inputs)
            and (op.type == "LoopCond" or self._texts[op] is not None)
        }

    def _note_variable(self, op: tf.Operation) -> None:
        if makes_handle(op):
            self.used.add(op.name)
            self._variables[op] = op.name
        elif op.inputs and op.inputs[0].op in self._variables:
            gives_reference = bool(op.outputs) and is_reference(op.outputs[0])
            if gives_reference or op.type in PASSING:  # an assignment to a reference returns it
                self._variables[op] = self._variables[op.inputs[0].op]

    def _describe(self, op: tf.Operation, caller: tf.Operation, conditions: Tensors) -> Text:
        may_not_run = None in map(self._text, conditions)
        if op.type in CALLS:  # read even if a condition varies
            results = self._call(op, caller, conditions)
            self._results[op] = [None] * len(results) if may_not_run else results
            return str(op.type)
        if may_not_run or op in self.data or op in self.local:
            return None
        if op in self.reduced or is_same_on_all_ranks(op):
            return "reduced"
        if OF_THIS_RANK.match(op.type):
            return None
        if op.type == "Const":
            return _constant(op)
        inputs = [self._text(tensor) for tensor in op.inputs]
        if None in inputs:
            return None
        if op in self._variables:
            name = self._variables[op]
            varies = name in self.local or is_filled_elsewhere(op, self.step)
            return None if varies else repr(name)
        takes_known = any(tensor.op in self._variables for tensor in op.inputs)
        if not takes_known and depends_on_more(op):
            return None
        if op.type in PASSING:
            return inputs[0]
        return _joined(op.type, inputs)

    def _text(self, tensor: tf.Tensor) -> Text:
        op, index = tensor.op, int(tensor.value_index)
        if op.type == "IdentityN":  # passes on each input separately
            return self._text(op.inputs[index])
        if op in self._results:
            return self._results[op][index]
        if op not in self._texts and op.type in READ_LATER:
            return None if op in self.local else "loop"
        text = self._texts.get(op)
        numbered = text not in (None, "reduced") and index
        return f"{text}[{index}]" if numbered else text

    def _call(self, op: tf.Operation, caller: tf.Operation, conditions: Tensors) -> list[Text]:
        if op.type in LOOPS:
            return self._loop(op, caller, conditions)
        decides = [op.inputs[0]] if op.type in BRANCHES else []
        called = [
            self._read_function(op, body, caller, [*conditions, *decides])
            for _, body in self._functions(op)
        ]
        texts = [*map(self._text, decides)]
        return [_joined(op.type, [*texts, *parts]) for parts in zip(*called)]

    def _loop(self, op: tf.Operation, caller: tf.Operation, conditions: Tensors) -> list[Text]:
        functions = dict(self._functions(op))
        condition, body = functions["cond"], functions["body"]
        before_condition = len(self.reductions)
        decides = self._read_function(op, condition, caller, conditions)
        for _, predicates in self.reductions[before_condition:]:
            predicates.extend(condition.outputs)  # of the iteration before
        results = self._read_function(op, body, caller, [*conditions, *condition.outputs])
        first = [self._texts[argument.op] for argument in body.inputs]
        arguments = zip(body.inputs, condition.inputs)
        for pair, before, after in zip(arguments, first, results):
            if before is not None and after is None:
                self.loops.update(argument.op for argument in pair)
        return [_joined(op.type, [*decides, *parts]) for parts in zip(first, results)]

    def _functions(self, op: tf.Operation) -> list[tuple[str, Any]]:
        if op not in self.bodies:
            self.bodies[op] = list(functions_called(op))
        return self.bodies[op]

    def _read_function(
        self, op: tf.Operation, body: Any, caller: tf.Operation, conditions: Tensors
    ) -> list[Text]:
        for argument, tensor in parameters(op, body):
            varies = argument.op in self.local
            self._texts[argument.op] = None if varies else self._text(tensor)
            if tensor.op in self._variables:
                self._variables[argument.op] = self._variables[tensor.op]
        self.read(walk(body.get_operations(), decided_before), caller, conditions)
        return [self._text(tensor) for tensor in body.outputs]

    def _note_change(self, op: tf.Operation, caller: tf.Operation, conditions: Tensors) -> None:
        values, changed = [], []
        decides = [self._text(each) for each in conditions]
        for argument, tensor, is_handle in arguments(op):
            if not is_handle:
                values.append((argument, self._text(tensor)))
            elif tensor.op in self._variables:
                changed.append((self._variables[tensor.op], self._text(tensor)))
        varies = None in decides or None in [text for _, text in values]
        for name, text in changed:
            self.changes.setdefault(name, []).append(caller)
            if varies or (text is None and name not in self.local):  # a branch passes it on
                self.varying.setdefault(name, []).append(caller)
        shown = [f"{name}={'data' if text is None else text}" for name, text in values]
        shown += [a.name for a in op.op_def.attr if _is_chosen(op, a)]
        shown += [f"if {'data' if text is None else text}" for text in decides]
        for name, _ in changed[:1]:
            self.described.setdefault(name, []).append(f"{op.type}({', '.join(shown)})")


def _is_chosen(op: tf.Operation, attribute: Any) -> bool:
    """Returns True for a switch that is on and changes the result, such as use_nesterov."""
    if attribute.type != "bool" or attribute.name in ("use_locking", "validate_shape"):
        return False
    return bool(op.get_attr(attribute.name))


def _joined(kind: str, texts: Sequence[Text]) -> Text:
    return None if None in texts else _short(f"{kind}({', '.join(map(str, texts))})")


def _constant(op: tf.Operation) -> str:
    value = tf.make_ndarray(op.get_attr("value"))
    if value.size > 8:
        return f"{value.dtype.name}{list(value.shape)} {zlib.crc32(value.tobytes()):08x}"
    return _short(str(value.tolist() if value.ndim else value))


def _short(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[: _SHOWN_CHARACTERS // 2]}... {zlib.crc32(text.encode()):08x}"
