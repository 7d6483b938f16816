"""DistributedGradientTape: a tape whose `gradient` returns reduced gradients."""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.gradient_reduction import GradientReduction
from hostopt.tensorflow.refusals import (
    choose_op,
    refuse_devices,
    refuse_groups,
    refuse_process_set,
)
from hostopt.tensorflow.wrapping import (
    LocalSources,
    change_class,
    reduce_gradients,
    register_local,
    super_of,
    telling_others,
    variables_of_layers,
)


def DistributedGradientTape(  # noqa: N802 - the name that programs know
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    name: str = "tape",
    bucket_cap_mb: float | None = None,
) -> Any:
    """Makes a tape reduce its gradients over the ranks; see `DistributedOptimizer`.

    Args:
      gradtape: the tape.
      name: name of the gradients, the same on all ranks.

    Returns:
      A tape with the same records, whose `gradient` returns reduced gradients. Gradients of
      sources that are given to its method `register_local_source` are not reduced.
    """
    refuse_devices(device_dense, device_sparse)
    refuse_process_set(process_set)
    refuse_groups(num_groups, groups)
    factor = gradient_predivide_factor
    if hasattr(gradtape, "_hostopt_reduction"):
        raise ConfigError("the tape is a DistributedGradientTape already. Wrap it once")
    reduction = GradientReduction(
        name, choose_op(op, None), compression, sparse_as_dense, bucket_cap_mb, 1 / factor, factor
    )
    distributed = copy.copy(gradtape)  # the tape of the program keeps the gradients of this rank
    change_class(
        distributed,
        {
            "gradient": telling_others(_tape_gradient),
            "jacobian": _refuse_jacobian,
            "batch_jacobian": _refuse_jacobian,
            "get_local_and_global_gradients": _local_and_global_gradients,
            "register_local_source": register_local,
            "_hostopt_local": LocalSources(scale_local_gradients),
            "_hostopt_reduction": reduction,
        },
    )
    return distributed


def PartialDistributedGradientTape(  # noqa: N802 - the name that programs know
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a tape reduce all gradients except some layers'; see `DistributedGradientTape`.

    Args:
      gradtape: the tape.
      local_layers: layer of Keras, or several, which have their variables.
    """
    variables = variables_of_layers(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables:
        tape.register_local_source(variable)
    return tape


def _local_and_global_gradients(
    self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Returns pairs of source and gradient: first of the local sources, then of all others."""
    pairs = list(zip(sources, self.gradient(target, sources, *args, **kwargs)))
    local = [pair for pair in pairs if pair[0] in self._hostopt_local]
    return local, [pair for pair in pairs if pair[0] not in self._hostopt_local]


def _refuse_jacobian(self: Any, *args: Any, **kwargs: Any) -> Any:
    del self, args, kwargs
    raise ConfigError(
        "a DistributedGradientTape reduces no Jacobians. Compute them with the tape that it was "
        "made from, and reduce the results with allreduce"
    )


def _tape_gradient(
    self: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    use_generic_names: bool = False,
    **kwargs: Any,
) -> Any:
    """Returns reduced gradients. With `use_generic_names` the ranks match them by position."""
    if not isinstance(use_generic_names, bool):
        raise ConfigError(
            f"use_generic_names is {use_generic_names!r}, wanted True or False. Give "
            "unconnected_gradients by name"
        )
    gradients = super_of(self).gradient(target, sources, output_gradients, **kwargs)
    flat = tf.nest.flatten(gradients)  # IndexedSlices are not taken apart
    reduced = reduce_gradients(self, flat, tf.nest.flatten(sources), use_generic_names)
    return tf.nest.pack_sequence_as(gradients, reduced)
