"""Variables and objects of one rank for all ranks."""

from __future__ import annotations

import base64
import collections
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hostopt import process_ring
from hostopt.errors import ConfigError
from hostopt.tensorflow.calls import broadcast_values, call_name, calling
from hostopt.tensorflow.checksums import check_same, checksums, has_numbers
from hostopt.tensorflow.collectives import check_root
from hostopt.tensorflow.refusals import refuse_device
from hostopt.tensorflow.wrapping import LOCAL


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: Any = None, inplace: bool = False
) -> Any:
    """Assigns the values of one rank to the variables of all ranks.

    Args:
      variables: variables of TensorFlow or Keras, the same on all ranks.
      root_rank: rank whose values are assigned.
      process_set: must be None or `global_process_set`.
      inplace: accepted for programs of Horovod, without effect.

    Returns:
      In a graph the operation that assigns; None if called eagerly.

    Raises:
      ConfigError: `root_rank` is not a rank.
      CollectiveMismatchError: two ranks have different variables.
    """
    variables = list(variables)
    assignments = []
    if variables:
        name = call_name("broadcast_variables", None)
        assignments = _assign(variables, root_rank, name, process_set)
    return None if tf.executing_eagerly() else tf.group(*assignments)


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Assigns the values of one rank to variables of all ranks, in place.

    Args:
      variables: the variables, the same on all ranks.
      root_rank: rank whose values are assigned.
      name: name of the call, the same on all ranks.
      process_set: must be None or `global_process_set`.

    Returns:
      The variables if called eagerly, else their values after the assignment.
    """
    name = call_name("broadcast_", name)
    assigned = _assign(variables, root_rank, name, process_set)
    return list(variables) if tf.executing_eagerly() else assigned


def _assign(variables: Sequence[Any], root_rank: int, name: str, process_set: Any) -> list[Any]:
    with calling(name, process_set) as ring:
        check_root(root_rank, ring.size)
        tensors = [tf.convert_to_tensor(each) for each in variables]
        values = broadcast_values(ring, tensors, root_rank, name)
    return [variable.assign(value) for variable, value in zip(variables, values)]


def broadcast_global_variables(root_rank: int = 0) -> Any:
    """Assigns the values of one rank to the global variables of all ranks, in a graph.

    Args:
      root_rank: rank whose values are assigned.

    Returns:
      The operation that assigns.

    Raises:
      ConfigError: called eagerly, or `root_rank` is not a rank.
    """
    if tf.executing_eagerly():
        raise ConfigError(
            "broadcast_global_variables is called eagerly, and then no collection has variables. "
            "Use broadcast_variables(model.variables, root_rank=0)"
        )
    variables = tf.compat.v1.global_variables()
    return broadcast_variables(sorted(variables, key=lambda each: each.name), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Assigns the values of one rank to all global variables, once the session is initialized.

    At the end of the training it compares the trainable variables of the ranks, except those
    given to `register_local_var`.

    Args:
      root_rank: rank whose values are assigned.
      device: must be empty.
    """

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        refuse_device(device)
        self._root_rank = root_rank
        self._operation: Any = None
        self._compared: list[tf.Variable] = []

    def begin(self) -> None:
        """Adds the operation to the graph."""
        self._operation = broadcast_global_variables(self._root_rank)
        local = {id(each) for each in tf.compat.v1.get_collection(LOCAL)}
        trained = (each for each in tf.compat.v1.trainable_variables() if id(each) not in local)
        self._compared = sorted(filter(has_numbers, trained), key=lambda each: each.name)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Assigns the values."""
        session.run(self._operation)

    def end(self, session: Any) -> None:
        """Raises CollectiveMismatchError if the ranks have trained different variables."""
        ring = process_ring.current()
        if ring.size == 1:
            return
        name = "the checksums of the variables at the end of the training"
        of_ranks = ring.named.all_gather(checksums(session, self._compared)[None], name)
        cluster = ring.communicator.transport.cluster
        check_same(of_ranks, self._compared, cluster, "after the training", _remedy)


def _remedy(names: Sequence[str]) -> str:
    return (
        f"Give all ranks the same gradients, learning rates and counters, or name {names[0]!r} in "
        "DistributedOptimizer.register_local_var if each rank trains its own"
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Returns the object of one rank on all ranks.

    Args:
      obj: None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, OrderedDict,
        numpy scalar or numpy array, nested in any way, but no subclass of these. Other ranks'
        objects are ignored.
      root_rank: rank whose object is returned.
      session: accepted for programs of TensorFlow 1, without effect.
      name: name of the call, the same on all ranks.
      process_set: must be None or `global_process_set`.

    Returns:
      A copy of the object.

    Raises:
      ConfigError: the object has parts of other types, on all ranks; or `root_rank` is not a rank.
    """
    name = name or "object"
    with calling(name, process_set) as ring:
        check_root(root_rank, ring.size)
        data = encode(obj) if ring.rank == root_rank else b""
        gathered = ring.named.all_gather_bytes(data, name)
    return _decode(gathered[root_rank], root_rank)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Callable[[Any], Any]:
    """Returns a function that takes an object, and calls `broadcast_object`."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Returns the objects of all ranks, in rank order; see `broadcast_object`."""
    name = name or "objects"
    with calling(name, process_set) as ring:
        gathered = ring.named.all_gather_bytes(encode(obj), name)
    return [_decode(each, rank) for rank, each in enumerate(gathered)]


def _decode(data: bytes, rank: int) -> Any:
    """Returns the object that a rank has sent; if it could not, all ranks raise the same error."""
    try:
        return decode(data)
    except ConfigError as error:
        who = process_ring.current().communicator.transport.cluster.describe(rank)
        raise ConfigError(f"{who} cannot send its object: {error}", rank=rank) from None


# -- objects as byte strings, without pickle: data of peers must not run code -----------------

_KINDS = (
    "None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, OrderedDict and numpy "
    "arrays"
)
_REFUSED = "refused"  # in the place of a type
_SEQUENCES: dict[str, type] = {each.__name__: each for each in (list, tuple, set, frozenset)}
_MAPPINGS: dict[str, type] = {each.__name__: each for each in (dict, collections.OrderedDict)}


def encode(obj: Any) -> bytes:
    """Encodes an object that is made of the types in `_KINDS`, or else the reason why it cannot.

    Their subclasses are refused, as the type would change on its way.

    Returns:
      JSON, in which each value except strings and numbers is a list of its type and its content.
    """
    try:
        return json.dumps(_to_json(obj)).encode()
    except TypeError as error:
        reason = str(error)
    except (RecursionError, ValueError) as error:
        reason = f"it cannot be encoded: {error}. Send a flatter one"
    return json.dumps([_REFUSED, reason]).encode()


def decode(data: bytes) -> Any:
    """Returns the object that was encoded; raises a ConfigError with the reason if it was not."""
    value = json.loads(data)
    if isinstance(value, list) and value[0] == _REFUSED:
        raise ConfigError(value[1])
    return _from_json(value)


def _to_json(obj: Any) -> Any:
    kind = type(obj)
    if obj is None or kind in (bool, int, float, str):
        return obj
    if kind is bytes:
        return ["bytes", base64.b64encode(obj).decode()]
    if kind in _SEQUENCES.values():
        return [kind.__name__, [_to_json(each) for each in obj]]
    if kind in _MAPPINGS.values():
        return [kind.__name__, [[_to_json(key), _to_json(value)] for key, value in obj.items()]]
    is_array = kind in (np.ndarray, np.memmap)
    if (is_array or isinstance(obj, np.generic)) and obj.dtype.kind not in "OV":
        file = io.BytesIO()
        np.save(file, obj, allow_pickle=False)
        return ["array" if is_array else "scalar", base64.b64encode(file.getvalue()).decode()]
    raise TypeError(
        f"it has a part of type {kind.__name__}, wanted {_KINDS}. Convert it, for example to a "
        "dict"
    )


def _from_json(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]([(_from_json(key), _from_json(each)) for key, each in content])
    if kind in ("array", "scalar"):
        array = np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)
        return array if kind == "array" else array[()]
    return _SEQUENCES[kind]([_from_json(each) for each in content])
