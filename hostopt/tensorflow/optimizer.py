"""DistributedOptimizer: gradients are reduced before they are applied."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import tensorflow as tf

from hostopt import process_ring
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.tensorflow.accumulation import GradientAccumulator
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.gradient_reduction import GradientReduction
from hostopt.tensorflow.local_sources import LocalSources
from hostopt.tensorflow.loss_scaling import decide_together
from hostopt.tensorflow.process_sets import refuse_process_set
from hostopt.tensorflow.refusals import choose_op, refuse_devices, refuse_groups
from hostopt.tensorflow.wrapping import (
    change_class,
    reduce_gradients,
    register_local,
    super_of,
)

__all__: list[str] = []


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
      name: name of the gradients, the same on all ranks; by default the number of the optimizer.
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
    refuse_devices(device_dense, device_sparse)
    refuse_process_set(process_set)
    refuse_groups(num_groups, groups)
    if backward_passes_per_step < 1:
        raise ConfigError(
            f"backward_passes_per_step is {backward_passes_per_step}, wanted a number above 0"
        )
    reducing = reducing_part(optimizer)
    if hasattr(reducing, "_hostopt_reduction"):
        raise ConfigError("the optimizer is a DistributedOptimizer already. Wrap it once")
    op = choose_op(op, None)
    prescale, postscale = 1.0, 1.0
    if gradient_predivide_factor != 1.0:
        if op is not ReduceOp.AVERAGE:
            raise ConfigError("gradient_predivide_factor needs op=AVERAGE. Leave one of them out")
        prescale, postscale = 1 / gradient_predivide_factor, gradient_predivide_factor
    if average_aggregated_gradients:
        postscale /= backward_passes_per_step
    reduction = GradientReduction(
        name or _number_of_optimizer(),
        op,
        compression,
        sparse_as_dense,
        bucket_cap_mb,
        prescale,
        postscale,
    )
    # attributes of the class, which clones of the optimizer have, too
    steps = backward_passes_per_step
    factor = 1 / steps if average_aggregated_gradients else 1.0
    attributes = {
        "_hostopt_reduction": reduction,
        "_hostopt_steps": steps,
        "_hostopt_local": LocalSources(scale_local_gradients, factor),
        "register_local_var": register_local,
    }
    plain = type(reducing)
    change_class(reducing, {**_methods_for(reducing), **attributes})
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


def _number_of_optimizer() -> str:
    numbers = process_ring.current().keep("optimizers", lambda: itertools.count(1))
    return f"optimizer {next(numbers)}"


def _methods_for(optimizer: Any) -> dict[str, Any]:
    """Returns the methods that make an optimizer of its kind reduce gradients."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return {"compute_gradients": _compute_gradients_v1, "apply_gradients": _apply_gradients}
    if hasattr(optimizer, "stateless_apply"):
        decide_together()
        return {"apply": _apply_keras_3}
    if hasattr(optimizer, "aggregate_gradients"):
        return {"aggregate_gradients": _reduce_pairs, "apply_gradients": _apply_gradients}
    if hasattr(optimizer, "_aggregate_gradients"):
        return {"_aggregate_gradients": _reduce_pairs, "apply_gradients": _apply_gradients}
    raise ConfigError(
        f"DistributedOptimizer is given an object of type {type(optimizer).__name__}, wanted an "
        "optimizer of tf.compat.v1.train or Keras. Reduce gradients with allreduce instead"
    )


def _reduce_pairs(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    reduced = reduce_gradients(self, [gradient for gradient, _ in pairs], variables)
    return list(zip(reduced, variables))


def _compute_gradients_v1(self: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = super_of(self).compute_gradients(*args, **kwargs)
    if self._hostopt_steps == 1:
        return _reduce_pairs(self, pairs)
    self._hostopt_computed = [gradient for gradient, _ in pairs]  # reduced when they are applied
    return pairs


def _apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    if self._hostopt_steps == 1:
        return super_of(self).apply_gradients(grads_and_vars, *args, **kwargs)
    is_v1 = isinstance(self, tf.compat.v1.train.Optimizer)
    grads_and_vars = list(grads_and_vars)
    if is_v1:
        computed = getattr(self, "_hostopt_computed", [])
        if not all(any(each is own for own in computed) for each, _ in grads_and_vars):
            raise ConfigError(
                f"backward_passes_per_step is {self._hostopt_steps}, and gradients are changed "
                "between compute_gradients and apply_gradients, before the ranks reduce them. Use "
                "backward_passes_per_step=1"
            )

    def apply(pairs: Any) -> Any:
        if is_v1:
            pairs = _reduce_pairs(self, pairs)
        return super_of(self).apply_gradients(pairs, *args, **kwargs)

    steps = _global_step(*args, **kwargs) if is_v1 else _iterations(self)
    return _accumulator(self).add_and_apply(grads_and_vars, apply, lambda: _increment(steps))


def _apply_keras_3(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    variables = trainable_variables
    if variables is None:
        variables = self._trainable_variables
    pairs = list(zip(grads, variables))

    def apply(pairs: Any) -> Any:
        pairs = _reduce_pairs(self, pairs)
        # an accumulator leaves out variables without a gradient
        applied = trainable_variables if self._hostopt_steps == 1 else [v for _, v in pairs]
        return super_of(self).apply([gradient for gradient, _ in pairs], applied)

    if self._hostopt_steps == 1:
        return apply(pairs)
    if not self.built:
        self.build(variables)
    # with accumulation of its own, Keras counts the steps in which it applies gradients
    steps = None if self.gradient_accumulation_steps else _iterations(self)
    return _accumulator(self).add_and_apply(pairs, apply, lambda: _increment(steps))


def _global_step(global_step: Any = None, name: Any = None) -> Any:
    """Returns an argument of `apply_gradients` of an optimizer of `tf.compat.v1.train`."""
    del name
    return global_step


def _iterations(self: Any) -> Any:
    with tf.init_scope():  # a legacy optimizer creates the variable when it is read
        return self.iterations


def _increment(steps: Any) -> Any:
    if steps is None:
        return None
    if hasattr(steps, "assign_add"):
        return steps.assign_add(1)
    return tf.compat.v1.assign_add(steps, 1)


def _accumulator(self: Any) -> GradientAccumulator:
    if "_hostopt_accumulator" not in vars(self):
        self._hostopt_accumulator = GradientAccumulator(self._hostopt_steps)
    accumulator: GradientAccumulator = self._hostopt_accumulator
    return accumulator
