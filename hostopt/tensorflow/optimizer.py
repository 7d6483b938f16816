"""DistributedOptimizer and DistributedGradientTape: both reduce gradients over the ranks."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import tensorflow as tf

from hostopt import process_ring
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.gradient_reduction import GradientReduction
from hostopt.tensorflow.optimizer_methods import methods_for
from hostopt.tensorflow.refusals import choose_op, refuse_unsupported
from hostopt.tensorflow.wrapping import (
    LocalSources,
    change_class,
    reduce_gradients,
    register_local,
    super_of,
    telling_others,
    variables_of_layers,
)


def DistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    bucket_cap_mb: float | None = None,
) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it applies them.

    Args:
      optimizer: optimizer of `tf.compat.v1.train`, of tf_keras (legacy or not) or of Keras 3 on
        TensorFlow. It is changed in place.
      name: name of the gradients, the same on all ranks; by default the number of the optimizer
        among those that reduce gradients.
      use_locking: accepted for programs of TensorFlow 1; the optimizer has its own.
      device_dense: must be empty, as reductions run on the host.
      device_sparse: must be empty.
      compression: `Compression.fp16` or `Compression.bf16` sends float32 with 16 bits between
        hosts.
      sparse_as_dense: True makes `tf.IndexedSlices` dense before they travel.
      backward_passes_per_step: number of steps whose gradients are summed before they are reduced
        and applied.
      op: AVERAGE, which is the default, or SUM.
      gradient_predivide_factor: gradients are divided by it before they are summed, and by size /
        it afterwards; needs op AVERAGE.
      average_aggregated_gradients: True divides by `backward_passes_per_step`.
      num_groups: must be 0; gradients travel in buckets.
      groups: must be None.
      process_set: must be None or `global_process_set`.
      scale_local_gradients: True divides gradients of variables that are registered with
        `register_local_var`, and not reduced, by size.
      bucket_cap_mb: size of a bucket in MiB; in bytes it must be a multiple of 128. The default is
        25. HOSTOPT_BUCKET_MB overrides the default and the argument.

    Returns:
      The optimizer, with a method `register_local_var(variable)`.

    Raises:
      ConfigError: an argument or the kind of optimizer is not supported.
    """
    del use_locking
    process_ring.current()  # which must be open
    refuse_unsupported(process_set, device_dense, device_sparse, num_groups, groups)
    if backward_passes_per_step < 1:
        raise ConfigError(
            f"backward_passes_per_step is {backward_passes_per_step}, wanted a number above 0"
        )
    reducing = reducing_part(optimizer)
    if hasattr(reducing, "_hostopt_reduction"):
        raise ConfigError("the optimizer is a DistributedOptimizer already. Wrap it once")
    op, divisor = choose_op(op, None), gradient_predivide_factor
    if divisor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ConfigError("gradient_predivide_factor needs op=AVERAGE. Leave one of them out")
    steps = backward_passes_per_step if average_aggregated_gradients else 1
    scales = 1 / divisor, divisor / steps
    # attributes of the class, which clones of the optimizer have, too
    attributes = {
        "_hostopt_reduction": GradientReduction(
            name or "", op, compression, sparse_as_dense, bucket_cap_mb, *scales
        ),
        "_hostopt_steps": backward_passes_per_step,
        "_hostopt_local": LocalSources(scale_local_gradients, 1 / steps),
        "register_local_var": register_local,
    }
    plain = type(reducing)
    change_class(reducing, {**methods_for(reducing), **attributes})
    _keep_registered_name(plain, type(reducing))
    return optimizer


def reducing_part(optimizer: Any) -> Any:
    """Returns the optimizer that reduces gradients; a LossScaleOptimizer of Keras 2 wraps it."""
    if hasattr(optimizer, "get_scaled_loss"):
        return optimizer.inner_optimizer
    return optimizer


def _keep_registered_name(plain: type, reducing: type) -> None:
    """Makes Keras save a class by the name that a program has registered for the plain one."""
    roots = {each.__module__.partition(".")[0] for each in plain.__mro__} & {"keras", "tf_keras"}
    for root in roots:
        saving = importlib.import_module(root).saving
        package, separator, name = saving.get_registered_name(plain).partition(">")
        if separator:
            register = saving.register_keras_serializable(package, name)
            register(reducing)
            register(plain)  # the last one is what the name loads


# -- tapes --------------------------------------------------------------------------------


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
    refuse_unsupported(process_set, device_dense, device_sparse, num_groups, groups)
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
