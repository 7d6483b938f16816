"""What kinds of operations there are, as far as it decides on who has the same values."""

from __future__ import annotations

import re
from collections.abc import Collection

import tensorflow as tf

__all__: list[str] = []

# Take a variable and leave it as it is; all others that take one change it.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
READS += ("VarIsInitializedOp", "IsVariableInitialized", "DisableCopyOnRead")
READS += ("LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2")
# Pass a variable or a value on as it is.
PASSING = ("Identity", "Cast", "ReadVariableOp", "Switch", "RefSwitch", "Enter", "RefEnter")
PASSING += ("RefIdentity", "PlaceholderWithDefault")
# Of a loop of TensorFlow 1, whose beginning depends on them.
READ_LATER = ("NextIteration", "RefNextIteration", "LoopCond")
OF_THIS_RANK = re.compile(
    r"Iterator|Placeholder$|PyFunc|EagerPyFunc|ReadFile|MatchingFiles|Restore"
    r"|.*(Dataset|Reader|Random|Normal|Multinomial)|StatefulUniform"
)
VARIABLES = ("VarHandleOp", "VariableV2", "Variable")
# Have a state, or an effect, but what they return depends on their inputs alone.
_PURE = re.compile(
    r"CheckNumerics|Print|Assert|GuaranteeConst|Empty$|DebugIdentity|TensorArray|Cudnn|NoOp"
)
_TABLE = re.compile(r"(Mutable)?(Dense)?HashTable|Lookup")
_INITIALIZES_TABLE = re.compile(r"InitializeTable|LookupTableImport")


def depends_on_more(op: tf.Operation) -> bool:
    """Whether the values of an operation may depend on more than its inputs.

    Args:
      op: an operation that takes no variable, queue or the like.

    Returns:
      True if it has a state, and is not known to be harmless.
    """
    return op.op_def.is_stateful and _PURE.match(op.type) is None


def arguments(op: tf.Operation) -> list[tuple[str, tf.Tensor, bool]]:
    """What an operation takes.

    Args:
      op: of a graph.

    Returns:
      Of each input the name of the argument, the tensor, and whether the operation works on the
      variable, queue, table or the like behind it, rather than on a value.
    """
    found: list[tuple[str, tf.Tensor, bool]] = []
    inputs = iter(op.inputs)
    for argument in op.op_def.input_arg:
        count = op.get_attr(argument.number_attr) if argument.number_attr else 1
        if argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        for _, tensor in zip(range(count), inputs):
            is_handle = argument.is_ref or tensor.dtype == tf.resource
            found.append((argument.name, tensor, bool(is_handle)))
    return found


def takes_handle(op: tf.Operation) -> bool:
    """Whether an operation works on a variable, a queue, a table or the like.

    Args:
      op: of a graph.

    Returns:
      True if one of its inputs is one.
    """
    may = any(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype for tensor in op.inputs)
    return may and any(is_handle for _, _, is_handle in arguments(op))


def makes_handle(op: tf.Operation) -> bool:
    """Whether an operation is a variable, a queue, a table or the like.

    Args:
      op: of a graph.

    Returns:
      True for it; False for the argument of a function, and for an array of tensors, whose
      contents travel as a value.
    """
    if not op.outputs or op.type == "Placeholder" or op.type.startswith("TensorArray"):
        return False
    dtype = op.outputs[0].dtype
    return bool(dtype == tf.resource or dtype._is_ref_dtype) and not takes_handle(op)


def is_filled_elsewhere(op: tf.Operation, step: Collection[tf.Operation]) -> bool:
    """Whether something that is not part of a step puts values into a queue or the like.

    Args:
      op: the queue, or a variable, of which other rules hold.
      step: all operations of the step.

    Returns:
      True for a queue that is, False for a table that is initialized.
    """
    if op not in step or not makes_handle(op) or op.type in VARIABLES:
        return False
    is_table = _TABLE.match(op.type) is not None
    return any(
        len(consumer.inputs) > 1
        and consumer not in step
        and not (is_table and _INITIALIZES_TABLE.match(consumer.type))
        for consumer in op.outputs[0].consumers()
    )
