"""DistributedOptimizer, and the methods with which an optimizer reduces gradients.

`compute_gradients` reduces, so that a program that changes its results changes those of all ranks.
`apply_gradients` reduces what comes from elsewhere, such as a tape, and nothing twice. Optimizers
of TensorFlow 1 refuse it, as programs for Horovod may apply gradients of one rank on purpose.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hostopt import process_ring
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.tensorflow.collectives import allreduce
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.gradient_reduction import GradientReduction
from hostopt.tensorflow.reduced import Origin, mark, origins_of
from hostopt.tensorflow.refusals import choose_op, refuse_unsupported
from hostopt.tensorflow.wrapping import (
    LocalSources,
    change_class,
    reduce_gradients,
    reduction_of,
    register_local,
    super_of,
    telling_others,
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
    # other ranks learn of gradients that a method refuses
    methods = {name: telling_others(each) for name, each in _methods_for(reducing).items()}
    change_class(reducing, {**methods, **attributes})
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


# -- methods -----------------------------------------------------------------------------------


def _methods_for(optimizer: Any) -> dict[str, Any]:
    """Returns the methods that make an optimizer of its kind reduce gradients."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return {
            "compute_gradients": _computing("compute_gradients"),
            "apply_gradients": _apply_gradients,
        }
    if hasattr(optimizer, "stateless_apply"):
        _decide_together()
        return {"apply": _apply_keras_3}
    if hasattr(optimizer, "aggregate_gradients"):
        return {
            "compute_gradients": _computing("compute_gradients"),
            "aggregate_gradients": _reduce_others,
            "apply_gradients": _apply_gradients,
        }
    if hasattr(optimizer, "_aggregate_gradients"):
        return {
            "_compute_gradients": _computing("_compute_gradients"),
            "get_gradients": _get_gradients,
            "_aggregate_gradients": _reduce_others,
            "apply_gradients": _apply_gradients,
        }
    raise ConfigError(
        f"DistributedOptimizer is given an object of type {type(optimizer).__name__}, wanted an "
        "optimizer of tf.compat.v1.train or Keras. Reduce gradients with allreduce instead"
    )


def _reduce_pairs(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    reduced = reduce_gradients(self, [gradient for gradient, _ in pairs], variables)
    return list(zip(reduced, variables))


# -- gradients that are computed ------------------------------------------------------------


def _computing(name: str) -> Any:
    """Returns the method of a name, which computes gradients, and then reduces them."""

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = getattr(super_of(self), name)(*args, **kwargs)
        if self._hostopt_steps > 1:  # they are reduced when they are applied
            vars(self)["_hostopt_unreduced"] = [gradient for gradient, _ in pairs]
            return pairs
        _computed(self).update(id(variable) for _, variable in pairs)
        return _reduce_pairs(self, pairs)

    return compute


def _get_gradients(self: Any, loss: Any, params: Any) -> list[Any]:
    variables = tf.nest.flatten(params)
    gradients: list[Any] = super_of(self).get_gradients(loss, variables)
    return gradients if self._hostopt_steps > 1 else reduce_gradients(self, gradients, variables)


def _computed(self: Any) -> set[int]:
    """Returns the ids of variables whose gradients are computed, but not applied yet."""
    # not by setattr, with which Keras would track it
    result: set[int] = vars(self).setdefault("_hostopt_computed", set())
    return result


# -- gradients that are applied -------------------------------------------------------------


def _reduce_others(self: Any, grads_and_vars: Any, is_told_not_to: bool = False) -> list[Any]:
    """Reduces the gradients that are not reduced yet; see `_unreduced` for the arguments."""
    pairs = list(grads_and_vars)
    left = _unreduced(self, pairs, is_told_not_to)
    for i, pair in zip(left, _reduce_pairs(self, [pairs[i] for i in left])):
        pairs[i] = pair
    return pairs


def _unreduced(self: Any, pairs: list[Any], is_told_not_to: bool) -> list[int]:
    """Returns the positions of gradients that have to be reduced.

    Averages are the same if they are averaged again. So gradients are left out only if they are
    made from reduced ones and nothing else, as far as a graph shows it. If the program says that
    they are reduced, `is_told_not_to` is True.
    """
    left = []
    for i, origin in origins_of(pairs).items():
        variable = pairs[i][1]
        may_be_reduced = is_told_not_to or id(variable) in _computed(self)
        may_be_reduced |= bool(origin & (Origin.REDUCED | Origin.STORED))
        if origin == Origin.REDUCED or (may_be_reduced and variable in self._hostopt_local):
            continue
        if may_be_reduced:
            _check_again(self, variable)
        elif isinstance(self, tf.compat.v1.train.Optimizer):
            if origin and variable not in self._hostopt_local:
                _refuse_local(self, variable)
            continue
        left.append(i)
    return left


def _refuse_local(self: Any, variable: Any) -> None:
    if reduction_of(self).ring().size > 1:
        raise ConfigError(
            f"the gradient of {variable.name!r} is not reduced over the ranks, as it comes from "
            "elsewhere than compute_gradients. Use this or minimize; or register_local_var, for a "
            "variable of one rank"
        )


def _check_again(self: Any, variable: Any) -> None:
    """Raises ConfigError if reducing a gradient again may change it."""
    reduction = reduction_of(self)
    if reduction.op is not ReduceOp.AVERAGE and reduction.ring().size > 1:
        raise ConfigError(
            f"the gradient of {variable.name!r} may be reduced already, and a second sum would "
            "change it. Use op=Average; or give apply_gradients what compute_gradients returns, "
            "changed in the same tf.function and without other data, or not at all"
        )


def _apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    if self._hostopt_steps > 1:
        return _apply_sums(self, pairs, *args, **kwargs)
    plain_apply = super_of(self).apply_gradients
    pairs = _reduce_others(self, pairs, _is_told_not_to(plain_apply, pairs, *args, **kwargs))
    _computed(self).difference_update(id(variable) for _, variable in pairs)
    return plain_apply(pairs, *args, **kwargs)


def _is_told_not_to(apply: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns True if a program or a LossScaleOptimizer says that gradients are reduced."""
    bound = inspect.signature(apply).bind(*args, **kwargs).arguments
    arguments = {**bound, **bound.get("kwargs", {})}
    return (
        bool(arguments.get("skip_gradients_aggregation"))
        or arguments.get("experimental_aggregate_gradients") is False
    )


def _apply_sums(self: Any, pairs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Adds gradients to those of earlier steps, and reduces and applies the sums if it is time."""
    plain_apply = super_of(self).apply_gradients
    is_v1 = isinstance(self, tf.compat.v1.train.Optimizer)
    is_reduced = False
    if is_v1:
        computed = vars(self).get("_hostopt_unreduced", [])
        if not all(any(each is own for own in computed) for each, _ in pairs):
            raise ConfigError(
                f"backward_passes_per_step is {self._hostopt_steps}, and gradients are changed "
                "between compute_gradients and apply_gradients, before the ranks reduce them. Use "
                "backward_passes_per_step=1"
            )
    elif _is_told_not_to(plain_apply, pairs, *args, **kwargs):
        is_reduced = not _unreduced(self, pairs, is_told_not_to=True)
    else:
        for i, origin in origins_of(pairs).items():
            if origin & Origin.REDUCED:
                _check_again(self, pairs[i][1])

    def apply(sums: Any) -> Any:
        if is_reduced:
            mark([gradient for gradient, _ in sums])
        else:
            sums = _reduce_pairs(self, sums)
        return plain_apply(sums, *args, **kwargs)

    steps = _global_step(*args, **kwargs) if is_v1 else _iterations(self)
    return _accumulate(self, pairs, apply, steps)


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
    return _accumulate(self, pairs, apply, steps)


def _global_step(global_step: Any = None, name: Any = None) -> Any:
    """Returns an argument of `apply_gradients` of an optimizer of `tf.compat.v1.train`."""
    return global_step


def _iterations(self: Any) -> Any:
    with tf.init_scope():  # a legacy optimizer creates the variable when it is read
        return self.iterations


# -- loss scaling ----------------------------------------------------------------------------


def _decide_together() -> None:
    """Makes every LossScaleOptimizer of Keras 3 skip a step if one of the ranks has to.

    In Keras 2, such an optimizer reduces gradients before it checks that they are finite. In
    Keras 3, the optimizer inside it reduces them, after the decision of each rank.
    """
    scaler = importlib.import_module("keras").optimizers.LossScaleOptimizer
    check_finite = scaler.check_finite
    if hasattr(check_finite, "_hostopt"):
        return

    def check_finite_on_all_ranks(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        if not hasattr(self.inner_optimizer, "_hostopt_reduction"):
            return finite
        name = f"finite gradients of {reduction_of(self.inner_optimizer).name}"
        return tf.cast(allreduce(tf.cast(finite, tf.int32), op=ReduceOp.MIN, name=name), tf.bool)

    check_finite_on_all_ranks._hostopt = True  # type: ignore[attr-defined]
    scaler.check_finite = check_finite_on_all_ranks


# -- accumulation ----------------------------------------------------------------------------


def _accumulate(self: Any, pairs: list[Any], apply: Callable[[Any], Any], steps: Any) -> Any:
    """Sums gradients on this rank, and applies the sums if this is the last step of a group.

    Args:
      pairs: gradients and variables, the same variables in each call.
      apply: applies pairs of sums and variables.
      steps: variable that counts a step in which nothing is applied, as `apply` counts the
        others; None if there is none.

    Returns:
      In a graph the operation that does this; None if called eagerly.
    """
    pairs = [(gradient, v) for gradient, v in pairs if gradient is not None]
    sums = _sums_of(self, [variable for _, variable in pairs])
    additions = [
        total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        for total, (gradient, _) in zip(sums.totals, pairs)
    ]
    with tf.control_dependencies(additions):
        count = sums.count.assign_add(1)

    def apply_sums() -> Any:
        values = [tf.identity(total) for total in sums.totals]
        with _after(apply(list(zip(values, sums.variables)))):
            resets = [total.assign(tf.zeros_like(total)) for total in sums.totals]
        with tf.control_dependencies(resets):
            return tf.constant(True)

    def apply_nothing() -> Any:
        with _after(None if steps is None else steps.assign_add(1)):
            return tf.constant(False)

    with tf.control_dependencies([count]):
        is_last = tf.equal(count % self._hostopt_steps, 0)
    done = tf.cond(is_last, apply_sums, apply_nothing)
    return None if tf.executing_eagerly() else done.op


@dataclasses.dataclass
class _Sums:
    """Sums of the gradients of a group of steps."""

    variables: list[Any]  # of the model
    totals: list[Any]
    count: Any  # of all steps


def _sums_of(self: Any, variables: list[Any]) -> _Sums:
    sums: _Sums | None = vars(self).get("_hostopt_sums")
    if sums is None:
        with tf.init_scope():
            zeros = [tf.zeros(v.shape, tf.as_dtype(v.dtype).base_dtype) for v in variables]
            count, *totals = [
                tf.Variable(each, trainable=False, name="accumulated_gradients")
                for each in (tf.zeros([], tf.int64), *zeros)
            ]
        sums = vars(self)["_hostopt_sums"] = _Sums(variables, totals, count)
    if [id(each) for each in variables] != [id(each) for each in sums.variables]:
        raise ConfigError(
            f"gradients of {len(variables)} variables are added to those of "
            f"{len(sums.variables)} others, as backward_passes_per_step is {self._hostopt_steps}. "
            "Give each call the gradients of the same variables, or use 1"
        )
    return sums


def _after(operation: Any) -> Any:
    is_in_graph = operation is not None and not tf.executing_eagerly()
    return tf.control_dependencies([operation] if is_in_graph else [])
