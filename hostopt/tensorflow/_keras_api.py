"""Horovod's API for Keras: what is the same for Keras 2 and Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostopt import tensorflow as hvd
from hostopt.tensorflow import _names
from hostopt.tensorflow._names import *  # noqa: F403 - the same names
from hostopt.tensorflow.optimizer import reducing_part
from hostopt.tensorflow.wrapping import variables_of_layers

__all__ = ["PartialDistributedOptimizer", "allgather", "allreduce", "broadcast", "reducescatter"]
__all__ += _names.__all__


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: hvd.ReduceOp | None = None,
    compression: Any = hvd.Compression.none,
) -> Any:
    """Reduces a value over the ranks; see `hostopt.tensorflow.allreduce` for the arguments."""
    return hvd.allreduce(
        value,
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Joins the values of all ranks along the first dimension."""
    return hvd.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of one rank."""
    return hvd.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: hvd.ReduceOp = hvd.Average) -> Any:
    """Reduces a value over the ranks, and returns a part of its rows to each rank."""
    return hvd.reducescatter(value, op=op, name=name)


def DistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: hvd.ReduceOp | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    bucket_cap_mb: float | None = None,
) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it applies them.

    See `hostopt.tensorflow.DistributedOptimizer` for the arguments.
    """
    return hvd.DistributedOptimizer(
        optimizer,
        name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        bucket_cap_mb=bucket_cap_mb,
    )


def PartialDistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: hvd.ReduceOp | None = None,
    groups: Any = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
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
    optimizer = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        reducing_part(optimizer).register_local_var(variable)
    return optimizer


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
