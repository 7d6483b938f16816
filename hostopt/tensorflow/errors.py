"""Errors that are also those of TensorFlow which programs for Horovod expect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError

# Errors of Horovod's operations and functions: tensors that differ between ranks, and arguments.
# An operation that raises a ValueError fails with an InvalidArgumentError.
_BASES: dict[type, tuple[type, ...]] = {
    CollectiveMismatchError: (tf.errors.FailedPreconditionError,),
    ConfigError: (NotImplementedError, ValueError, tf.errors.InvalidArgumentError),
}


def as_tensorflow_error(error: HostOptError) -> HostOptError:
    """Returns the same error as one of TensorFlow, too, if it has one for this kind."""
    kind: Any = type(error)
    if kind not in _BASES:
        return error
    both = _kind_of_both(kind)
    converted: HostOptError = both(None, None, error.message)
    vars(converted).update(vars(error))
    converted.args = error.args
    return converted.with_traceback(error.__traceback__)


def with_tensorflow_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function raise errors of both kinds."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except HostOptError as error:
            raise as_tensorflow_error(error) from None

    return call


@functools.cache
def _kind_of_both(kind: Any) -> Any:
    attributes = {
        "__init__": _init,
        "__str__": Exception.__str__,
        "__reduce__": lambda self: (kind, self.args, vars(self)),
        "__module__": kind.__module__,
        # those of an OpError are properties that need its own constructor
        "message": "",
        "error_code": _BASES[kind][-1](None, None, "").error_code,
        "op": None,
        "node_def": None,
        "experimental_payloads": {},
    }
    return type(kind.__name__, (kind, *_BASES[kind]), attributes)


def _init(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
    """Takes the arguments of an OpError, with which AutoGraph and Keras make an error anew."""
    del node_def, op, args
    HostOptError.__init__(self, message)
