"""Horovod's API for Keras: what is the same for Keras 2 and Keras 3."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hostopt import tensorflow as hvd
from hostopt.tensorflow import _names
from hostopt.tensorflow._names import *  # noqa: F403 - the same names
from hostopt.tensorflow._names import __all__ as __all__  # noqa: PLC0414 - mypy does not see `+=`
from hostopt.tensorflow.optimizer import reducing_part
from hostopt.tensorflow.wrapping import variables_of_layers

__all__ = ["PartialDistributedOptimizer", "allgather", "allreduce", "broadcast", "reducescatter"]  # noqa: F811
__all__ += _names.__all__
_T = TypeVar("_T")


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of one rank."""
    return hvd.broadcast(value, root_rank, name)


# -- Horovod's functions for TensorFlow, with the order that their parameters have for Keras ----


def reordered(
    order: str, *others: Callable[..., Any]
) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Returns a decorator that puts the parameters of a function in another order.

    Args:
      order: names of the parameters; those after a "*" are given by name only. The first one may
        have another name than in the function. Those that are left out keep their defaults.
      others: functions to which the function passes its other arguments.
    """
    positional, _, by_name = order.partition(" * ")
    first, *names = positional.split()

    def decorate(function: Callable[..., _T]) -> Callable[..., _T]:
        known: dict[str, inspect.Parameter] = {}
        for each in (*others, function):
            known.update(inspect.signature(each).parameters)
        parameters = [inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += [known[name] for name in names]
        parameters += [
            known[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in by_name.split()
        ]
        signature = inspect.Signature(parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> _T:
            arguments = signature.bind(*args, **kwargs).arguments
            return function(arguments.pop(first), **arguments)

        vars(call)["__signature__"] = signature
        return call

    return decorate


OPTIMIZER = (
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op"
)

allgather = reordered("value name")(hvd.allgather)
reducescatter = reordered("value name op")(hvd.reducescatter)
allreduce = reordered("value name average prescale_factor postscale_factor op compression")(
    hvd.allreduce
)

DistributedOptimizer = reordered(
    f"{OPTIMIZER} backward_passes_per_step average_aggregated_gradients num_groups groups "
    "process_set scale_local_gradients bucket_cap_mb"
)(hvd.DistributedOptimizer)


@reordered(
    f"{OPTIMIZER} groups process_set local_layers scale_local_gradients", hvd.DistributedOptimizer
)
def PartialDistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any, local_layers: Any = None, **arguments: Any
) -> Any:
    """Makes an optimizer reduce the gradients of all layers except some.

    See `hostopt.tensorflow.DistributedOptimizer` for the other arguments.

    Args:
      optimizer: the optimizer.
      local_layers: layer of Keras, or several, which have their variables.

    Returns:
      The optimizer.
    """
    variables = variables_of_layers(local_layers)
    optimizer = hvd.DistributedOptimizer(optimizer, **arguments)
    for variable in variables:
        reducing_part(optimizer).register_local_var(variable)
    return optimizer


# -- models ---------------------------------------------------------------------------------


def model_loader(keras: Any) -> Callable[..., Any]:
    """Returns `load_model` for models of Keras 2 or Keras 3."""

    def load_model(
        filepath: Any,
        custom_optimizers: Any = None,
        custom_objects: Any = None,
        compression: Any = hvd.Compression.none,
        legacy_opts: bool = False,
    ) -> Any:
        """Loads a model, and makes its optimizer a `DistributedOptimizer`.

        Args:
          filepath: file or directory of the model.
          custom_optimizers: classes of optimizers that are not part of Keras.
          custom_objects: other objects by the names that the file has for them.
          compression: as for `DistributedOptimizer`.
          legacy_opts: accepted for programs of Horovod, without effect: the optimizer stays of the
            kind that was saved.

        Returns:
          The model.
        """
        del legacy_opts
        objects = {each.__name__: each for each in custom_optimizers or []}
        objects.update(custom_objects or {})
        model = keras.models.load_model(filepath, custom_objects=objects)
        if getattr(model, "optimizer", None) is not None:
            hvd.DistributedOptimizer(model.optimizer, compression=compression)
        return model

    return load_model
