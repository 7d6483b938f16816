"""Objects of a program that get other methods, so that they reduce gradients, such as a tape."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hostopt import process_ring
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.tensorflow.calls import count_use, scale, telling
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.gradient_reduction import GradientReduction
from hostopt.tensorflow.reduced import mark
from hostopt.tensorflow.refusals import choose_op, refuse_unsupported
from hostopt.tensorflow.sparse import map_values

LOCAL = "hostopt_local"  # collection of a graph: variables that each rank trains on its own


def change_class(instance: Any, methods: dict[str, Any]) -> None:
    """Gives an object a subclass of its class, of the same name, with other methods."""
    old = type(instance)
    new = type(old.__name__, (old,), {**methods, "__module__": old.__module__, "_hostopt": True})
    instance.__class__ = new


def super_of(instance: Any) -> Any:
    """Returns the object as its class was before `change_class`."""
    return super(_changed_class(instance), instance)


def _changed_class(instance: Any) -> Any:
    return next(each for each in type(instance).__mro__ if "_hostopt" in vars(each))


def register_local(self: Any, source: Any) -> None:
    """Makes a variable or another source local to this rank: its gradients are not reduced."""
    self._hostopt_local.add(source)


def telling_others(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that tells the other ranks if this one refuses gradients."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._hostopt_reduction.ring()  # which must be open
        with telling(lambda error: reduction_of(self).refuse(error)):
            return method(self, *args, **kwargs)

    return call


def reduction_of(instance: Any) -> GradientReduction:
    """Returns the reduction of an optimizer or a tape.

    An optimizer without a name is numbered when it first reduces gradients: a rank may have others
    that never do. The numbers begin anew in each graph of TensorFlow 1, as an Estimator calls a
    model_fn for each training and evaluation, and a rank may evaluate more often.
    """
    reduction: GradientReduction = instance._hostopt_reduction
    if not reduction.name:
        with tf.init_scope():
            if tf.executing_eagerly():
                numbers = process_ring.current().keep("optimizers", lambda: itertools.count(1))
                number = next(numbers)
            else:
                number = count_use("optimizers")
        reduction = dataclasses.replace(reduction, name=f"optimizer {number}")
        _changed_class(instance)._hostopt_reduction = reduction  # also of clones
    return reduction


def reduce_gradients(instance: Any, *arguments: Any) -> list[Any]:
    """Reduces gradients for an optimizer or a tape; see `LocalSources.reduce`."""
    local: LocalSources = instance._hostopt_local
    return local.reduce(reduction_of(instance), *arguments)


# -- variables that each rank trains on its own, as in models distributed over the ranks ----


@dataclasses.dataclass(eq=False)
class LocalSources:
    """Variables whose gradients are not reduced."""

    # True divides their gradients by size, as if they were averaged with zeros of other ranks
    is_scaled: bool
    factor: float = 1.0  # by which their gradients are multiplied, too
    by_id: dict[int, Any] = dataclasses.field(default_factory=dict)

    def add(self, source: Any) -> None:
        """Makes a variable, or another source of a tape, local."""
        source = _without_wrapper(source)
        self.by_id[id(source)] = source
        if not tf.executing_eagerly():  # a program may make a tape for each step
            tf.compat.v1.add_to_collection(LOCAL, source)

    def __contains__(self, source: Any) -> bool:
        return id(_without_wrapper(source)) in self.by_id

    def reduce(
        self,
        reduction: GradientReduction,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        use_generic_names: bool = False,
    ) -> list[Any]:
        """Reduces all other gradients over the ranks.

        With `use_generic_names`, gradients are named by their position instead of their variable.
        """
        shared = [i for i, source in enumerate(sources) if source not in self]
        variables = [None if use_generic_names else sources[i] for i in shared]
        reduced = reduction.reduce([gradients[i] for i in shared], variables)
        factor = self.factor / (reduction.ring().size if self.is_scaled else 1)
        results = list(gradients)
        for i, source in enumerate(sources):
            if source in self and gradients[i] is not None:
                results[i] = map_values(lambda v: scale(v, factor), gradients[i])
        for i, each in zip(shared, reduced):
            results[i] = each
        mark(results)
        return results


def _without_wrapper(source: Any) -> Any:
    """Returns the variable of TensorFlow that a variable of Keras 3 holds, or else the source."""
    value = getattr(source, "value", None)
    return value if isinstance(value, tf.Variable) else source


def variables_of_layers(layers: Any) -> list[Any]:
    """Returns the trained variables of a layer of Keras, or of several; None for none."""
    if layers is None:
        return []
    if hasattr(layers, "trainable_weights"):
        layers = [layers]
    for each in layers:
        if not hasattr(each, "trainable_weights"):
            raise ConfigError(
                f"local_layers has an object of type {type(each).__name__}, wanted layers of "
                "Keras. Register single variables with register_local_source"
            )
        if not each.built:
            raise ConfigError(
                f"the layer {each.name!r} of local_layers has no variables yet. Build its model "
                "first, for example with an Input"
            )
    return [variable for each in layers for variable in each.trainable_weights]


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
