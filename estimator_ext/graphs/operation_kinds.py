"""Kinds of operations, by which the values of the ranks are known to be the same or not."""

from __future__ import annotations

import re
from collections.abc import Collection

import tensorflow as tf

from estimator_ext._tf_private import is_reference

GATHERS = ("ResourceGather", "ResourceGatherNd")
# Read a variable. All other operations that take one change it.
READS: tuple[str, ...] = ("ReadVariableOp", *GATHERS, "VariableShape")
READS += ("VarIsInitializedOp", "IsVariableInitialized", "DisableCopyOnRead")
READS += ("LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2")
# Pass on a variable or a value.
PASSING: tuple[str, ...] = ("Identity", "Cast", "ReadVariableOp", "Switch", "RefSwitch", "Enter")
PASSING += ("RefEnter", "RefIdentity", "PlaceholderWithDefault")
# Parts of a TensorFlow 1 loop that its beginning depends on.
READ_LATER = ("NextIteration", "RefNextIteration", "LoopCond")
# May have other values on each rank.
OF_THIS_RANK = re.compile(
    r"Iterator|Placeholder$|(Eager)?PyFunc|ReadFile|MatchingFiles|Restore|StatefulUniform"
    r"|.*(Dataset|Reader|Random|Normal|Multinomial)"
)
# Those of them that are the same on all ranks if seeds and programs are.
SEEDED = re.compile(r"(Eager)?PyFunc|StatefulUniform|.*(Random|Normal|Multinomial)")
ADDING = ("AddV2", "Add", "AddN", "Sub")
PRODUCTS = ("Mul", "MulNoNan")
QUOTIENTS = ("RealDiv", "Div", "DivNoNan", "Xdivy")
VARIABLES = ("VarHandleOp", "VariableV2", "Variable")
# Have state or side effects, but their outputs depend only on their inputs.
_PURE = re.compile(
    r"CheckNumerics|Print|Assert|GuaranteeConst|Empty$|DebugIdentity|TensorArray|Cudnn|NoOp"
)
_TABLE = re.compile(r"(Mutable)?(Dense)?HashTable|Lookup")
_INITIALIZES_TABLE = re.compile(r"InitializeTable|LookupTableImport")


def depends_on_more(op: tf.Operation) -> bool:
    """Returns True if more than its inputs, none of which is a handle, may decide its outputs."""
    return op.op_def.is_stateful and _PURE.match(op.type) is None


def arguments(op: tf.Operation) -> list[tuple[str, tf.Tensor, bool]]:
    """Returns for each input its argument's name, the tensor, and True if it is a handle."""
    result: list[tuple[str, tf.Tensor, bool]] = []
    inputs = iter(op.inputs)
    for argument in op.op_def.input_arg:
        count = op.get_attr(argument.number_attr) if argument.number_attr else 1
        if argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        for _, tensor in zip(range(count), inputs):
            is_handle = argument.is_ref or tensor.dtype == tf.resource
            result.append((argument.name, tensor, bool(is_handle)))
    return result


def takes_handle(op: tf.Operation) -> bool:
    """Returns True if an input of an operation is a variable, a queue, a table or the like."""
    may = any(tensor.dtype == tf.resource or is_reference(tensor) for tensor in op.inputs)
    return may and any(is_handle for _, _, is_handle in arguments(op))


def makes_handle(op: tf.Operation) -> bool:
    """Returns True if an operation creates a variable, a queue, a table or the like."""
    # a placeholder is the argument of a function; a TensorArray passes its contents as a value
    if not op.outputs or op.type == "Placeholder" or op.type.startswith("TensorArray"):
        return False
    tensor = op.outputs[0]
    return (tensor.dtype == tf.resource or is_reference(tensor)) and not takes_handle(op)


def is_filled_elsewhere(op: tf.Operation, step: Collection[tf.Operation]) -> bool:
    """Returns True if operations outside the step put values into a new queue or the like."""
    if op not in step or not makes_handle(op) or op.type in VARIABLES:
        return False
    # a table that is only initialized outside the step has the same values
    is_table = _TABLE.match(op.type) is not None
    return any(
        len(consumer.inputs) > 1
        and consumer not in step
        and not (is_table and _INITIALIZES_TABLE.match(consumer.type))
        for consumer in op.outputs[0].consumers()
    )
