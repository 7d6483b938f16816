"""What a training operation does to the variables, in words that ranks can compare.

Its operations are read in the order in which they were built, each described by those that it
reads. Descriptions end at variables, at sums over the ranks and at what depends on this rank's
data or on chance, which may differ by rank, and they name no operation: names are made up.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import tensorflow as tf
from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

from estimator_ext.sync_on_read import is_sync_on_read
from hostopt.tensorflow.ops import is_same_on_all_ranks

__all__: list[str] = []

# Take a variable and leave it as it is; all others that take one change it.
_READS = ("ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp")
_READS += ("IsVariableInitialized", "DisableCopyOnRead")
_VARIABLES = ("VarHandleOp", "VariableV2", "Variable")
# Pass a variable or a value on as it is.
_PASSING = ("Identity", "Cast", "ReadVariableOp", "Switch", "RefSwitch", "Enter", "RefEnter")
_OF_THIS_RANK = re.compile(
    r"Iterator|Placeholder$|PyFunc|EagerPyFunc|.*Dataset|.*(Random|Normal|Multinomial)"
    r"|StatefulUniform"
)
_SHOWN_CHARACTERS = 400

# Of an operation: its description, None where its values may differ by rank.
Text = Optional[str]


@dataclass(frozen=True)
class Updates:
    """What a step does to variables.

    Args:
      texts: description of all updates by name of the variable.
      mirrored: variables that the step uses, and that are the same on all ranks.
      own: names of variables that may differ by rank.
      varying: by name of a variable, the operations that assign to it what may differ by rank; of
        one in a function, the operation that calls it.
      is_same: whether all ranks have the same value of a tensor of the step.
    """

    texts: dict[str, str]
    mirrored: list[tf.Variable]
    own: frozenset[str]
    varying: dict[str, list[tf.Operation]]
    is_same: Callable[[tf.Tensor], bool]


def read_updates(targets: Sequence[tf.Operation], data: Collection[tf.Operation]) -> Updates:
    """Reads the graph of a step.

    A variable counts as the same on all ranks if it is trainable, or if nothing is assigned to it
    that depends on data or chance.

    Args:
      targets: what runs in a step, in the default graph.
      data: operations of this rank's input.

    Returns:
      What they do.
    """
    operations = ancestors(targets)
    variables = tf.compat.v1.global_variables()
    trainable = {variable.op.name for variable in tf.compat.v1.trainable_variables()}
    own = {v.op.name for v in tf.compat.v1.local_variables()}
    own |= {v.op.name for v in variables if is_sync_on_read(v)}
    while True:  # what a variable of this rank alone is assigned to becomes one itself
        reader = _Reader(own, data)
        reader.read(operations)
        more = reader.varying.keys() - own - trainable
        if not more:
            break
        own |= more
    mirrored = [v for v in variables if v.op.name in reader.used - own]
    names = {variable.op.name for variable in variables}
    return Updates(
        {n: "; ".join(sorted(found)) for n, found in reader.updates.items() if n in names},
        sorted(mirrored, key=lambda variable: variable.op.name),
        frozenset(own),
        reader.varying,
        reader.is_same,
    )


def ancestors(targets: Sequence[tf.Operation]) -> list[tf.Operation]:
    """All operations that run if some are run.

    Args:
      targets: those, of one graph; one at least.

    Returns:
      They and the others, in the order in which they were built.
    """
    seen, todo = set(targets), list(targets)
    while todo:
        op = todo.pop()
        new = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
        seen |= new
        todo += new
    return [op for op in targets[0].graph.get_operations() if op in seen]


@dataclass
class _Reader:
    """Describes operations, whose inputs it has described before.

    Args:
      own: names of variables that may differ by rank.
      data: operations whose values may differ by rank.
    """

    own: Collection[str]
    data: Collection[tf.Operation]
    used: set[str] = field(default_factory=set)
    updates: dict[str, list[str]] = field(default_factory=dict)
    varying: dict[str, list[tf.Operation]] = field(default_factory=dict)
    _texts: dict[tf.Operation, Text] = field(default_factory=dict)
    _variables: dict[tf.Operation, str] = field(default_factory=dict)

    def is_same(self, tensor: tf.Tensor) -> bool:
        """Whether all ranks have the same value of a tensor; False for one that was not read."""
        return tensor.op in self._texts and self._text(tensor) is not None

    def read(self, operations: Iterable[tf.Operation], caller: Any = None) -> None:
        """Describes operations, or those of a caller's body, in the order of their building."""
        for op in operations:
            if op in self._texts:  # an argument of a function
                continue
            if op.type in _VARIABLES:
                self.used.add(op.name)
                self._variables[op] = op.name
            elif op.type in _PASSING and op.inputs and op.inputs[0].op in self._variables:
                self._variables[op] = self._variables[op.inputs[0].op]
            self._texts[op] = self._describe(op, caller or op)
            if op not in self._variables and _takes_variable(op) and op.type not in _READS:
                self._note_update(op, caller or op)

    def _describe(self, op: tf.Operation, caller: tf.Operation) -> Text:
        if op in self._variables:
            name = self._variables[op]
            return None if name in self.own else repr(name)
        if is_same_on_all_ranks(op):
            return "reduced"
        if op in self.data or _OF_THIS_RANK.match(op.type):
            return None
        if op.type == "Const":
            return _constant(op)
        inputs = [self._text(tensor) for tensor in op.inputs]
        if None in inputs and not any(tensor.dtype == tf.resource for tensor in op.inputs):
            return None  # what a function of it assigns would be a resource
        results = self._results_of_functions(op, caller)
        if None in inputs or None in results:
            return None
        if op.type in _PASSING:
            return inputs[0]
        return _short(f"{op.type}({', '.join([*inputs, *results])})")

    def _text(self, tensor: tf.Tensor) -> Text:
        if tensor.op.type == "IdentityN":  # each output by itself
            return self._text(tensor.op.inputs[tensor.value_index])
        # an operation behind is in the body of a loop, which is read from its beginning
        text = self._texts.get(tensor.op, "loop")
        numbered = text not in (None, "reduced") and tensor.value_index
        return f"{text}[{tensor.value_index}]" if numbered else text

    def _results_of_functions(self, op: tf.Operation, caller: tf.Operation) -> list[Text]:
        """Read the branches, bodies and functions that an operation calls."""
        results = []
        for attribute in op.op_def.attr:
            if attribute.type not in ("func", "list(func)"):
                continue
            value = op.get_attr(attribute.name)
            for function in value if attribute.type == "list(func)" else [value]:
                results += self._read_function(op, function.name, caller)
        return results

    def _read_function(self, op: tf.Operation, name: str, caller: tf.Operation) -> list[Text]:
        body = get_func_graph(op, None, name)
        passed = op.inputs[len(op.inputs) - len(body.inputs) :]  # the first may say which branch
        for argument, tensor in zip(body.inputs, passed):
            self._texts[argument.op] = self._text(tensor)
            if tensor.op in self._variables:
                self._variables[argument.op] = self._variables[tensor.op]
        self.read(body.get_operations(), caller)
        return [self._text(tensor) for tensor in body.outputs]

    def _note_update(self, op: tf.Operation, caller: tf.Operation) -> None:
        variable = self._variables.get(op.inputs[0].op)
        if variable is None:  # a table, an iterator, a queue
            return
        names = [argument.name for argument in op.op_def.input_arg]
        values = [
            (name, self._text(tensor))
            for name, tensor in list(zip(names, op.inputs))[1:]
            if tensor.dtype != tf.resource and not tensor.dtype._is_ref_dtype  # slots
        ]
        if any(text is None for _, text in values):
            self.varying.setdefault(variable, []).append(caller)
        shown = [f"{name}={'data' if text is None else text}" for name, text in values]
        shown += [a.name for a in op.op_def.attr if _is_chosen(op, a)]
        self.updates.setdefault(variable, []).append(f"{op.type}({', '.join(shown)})")


def _takes_variable(op: tf.Operation) -> bool:
    """Whether the first argument is a resource or a reference, and not one of a function."""
    arguments = op.op_def.input_arg
    if not arguments or not op.inputs:
        return False
    return arguments[0].is_ref or arguments[0].type == tf.resource.as_datatype_enum


def _is_chosen(op: tf.Operation, attribute: Any) -> bool:
    """Whether an attribute is a switch that is on and changes the result, such as use_nesterov."""
    if attribute.type != "bool" or attribute.name in ("use_locking", "validate_shape"):
        return False
    return bool(op.get_attr(attribute.name))


def _constant(op: tf.Operation) -> str:
    value = tf.make_ndarray(op.get_attr("value"))
    if value.size > 8:
        return f"{value.dtype.name}{list(value.shape)} {zlib.crc32(value.tobytes()):08x}"
    return _short(str(value.tolist() if value.ndim else value))


def _short(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[: _SHOWN_CHARACTERS // 2]}... {zlib.crc32(text.encode()):08x}"
