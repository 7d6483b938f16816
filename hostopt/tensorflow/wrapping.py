"""Objects of a program that get other methods, so that they reduce gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from hostopt import process_ring
from hostopt.tensorflow.calls import count_in_session_graph, telling
from hostopt.tensorflow.gradient_reduction import GradientReduction


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
        number = count_in_session_graph("optimizers")
        if number is None:
            numbers = process_ring.current().keep("optimizers", lambda: itertools.count(1))
            number = next(numbers)
        reduction = dataclasses.replace(reduction, name=f"optimizer {number}")
        _changed_class(instance)._hostopt_reduction = reduction  # also of clones
    return reduction


def reduce_gradients(
    self: Any, gradients: Any, sources: Any, use_generic_names: bool = False
) -> list[Any]:
    """Reduces gradients as an optimizer does that `instance_of` has changed."""
    reduced: list[Any] = self._hostopt_local.reduce(
        reduction_of(self), gradients, sources, use_generic_names
    )
    return reduced
