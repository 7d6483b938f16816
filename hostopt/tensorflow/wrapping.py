"""Objects of a program that get other methods, so that they reduce gradients."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


def change_class(instance: Any, methods: dict[str, Any]) -> None:
    """Gives an object a subclass of its class, of the same name, with other methods."""
    old = type(instance)
    new = type(old.__name__, (old,), {**methods, "__module__": old.__module__, "_hostopt": True})
    instance.__class__ = new


def super_of(instance: Any) -> Any:
    """Returns the object as its class was before `change_class`."""
    changed = next(each for each in type(instance).__mro__ if "_hostopt" in vars(each))
    return super(changed, instance)


def register_local(self: Any, source: Any) -> None:
    """Makes a variable or another source local to this rank: its gradients are not reduced."""
    self._hostopt_local.add(source)


def reduce_gradients(
    self: Any, gradients: Any, sources: Any, use_generic_names: bool = False
) -> list[Any]:
    reduced: list[Any] = self._hostopt_local.reduce(
        self._hostopt_reduction, gradients, sources, use_generic_names
    )
    return reduced
