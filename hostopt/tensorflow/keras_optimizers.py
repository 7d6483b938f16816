"""DistributedOptimizer with the orders of arguments of Horovod's Keras APIs."""

from __future__ import annotations

from typing import Any

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.tensorflow import optimizer as with_other_arguments
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.local_sources import variables_of_layers


def DistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | None = None,
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
    return with_other_arguments.DistributedOptimizer(
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
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | None = None,
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
        with_other_arguments.reducing_part(optimizer).register_local_var(variable)
    return optimizer
