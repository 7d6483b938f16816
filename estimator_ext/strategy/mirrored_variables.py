"""Variables that have the same value on all ranks, in functions of TensorFlow 2 and eagerly.

TensorFlow's strategies allow gradients outside `strategy.run`, and updates with the data of one
rank. Here both are refused, as each rank would then train a different model.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    VARIABLE_CLASSES,
    MirroredVariable,
    updating_replica,
)
from estimator_ext.graphs.operation_kinds import OF_THIS_RANK
from estimator_ext.graphs.walks import data_before, walk
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow._tf_private import is_recording
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.calls import call
from hostopt.tensorflow.checksums import checksum
from hostopt.tensorflow.ops import is_same_on_all_ranks

_REMEDY = "Do this in a function that is given to strategy.run, with an optimizer"
_ASSIGNED = "the values that are assigned outside strategy.run"


class HostVariable(MirroredVariable):
    """A variable of a `HostOffloadStrategy`, with one component: the variable of this rank."""

    @property
    def _is_shared(self) -> bool:
        return bool(self.trainable and self.distribute_strategy.num_replicas_in_sync > 1)

    def _get(self) -> Any:
        if self._is_shared and is_recording():
            self._check_in_run("its gradient is computed")
        return super()._get()

    @property
    def handle(self) -> Any:
        """The resource of this rank's variable."""
        self._check_update()
        return super().handle

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        self._check_update()
        return super()._update(update_fn, value, **kwargs)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        is_local = self.aggregation == tf.VariableAggregation.NONE
        if self._is_shared and is_local and _may_differ_between_ranks(value):
            raise hostopt.ConfigError(
                f"variable {self.name!r} is updated in strategy.run with a value of this rank, "
                "so that ranks would train different models. Reduce it with "
                "replica_context.all_reduce in a tf.function, use an optimizer, or create the "
                "variable with aggregation=tf.VariableAggregation.MEAN"
            )
        return super()._update_replica(update_fn, value, **kwargs)

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        extended = self.distribute_strategy.extended
        if self._is_shared and not isinstance(value, HostVariable):
            if not isinstance(value, tf.IndexedSlices):
                value = tf.convert_to_tensor(value, self.dtype)
            if _may_differ_between_ranks(value):
                value = _compared(extended.ring(), value, self.name)
        return extended.update_variable(self, update_fn, (value,), kwargs, True)

    def _check_update(self) -> None:
        if self._is_shared and updating_replica() is not None:
            self._check_in_run("it is updated")

    def _check_in_run(self, event: str) -> None:
        if not self.distribute_strategy.extended.is_running:
            raise hostopt.ConfigError(
                f"variable {self.name!r}: {event} outside strategy.run, where ranks do not reduce "
                f"gradients. {_REMEDY}"
            )


CLASSES = {
    key: HostVariable if kind is MirroredVariable else kind
    for key, kind in VARIABLE_CLASSES.items()
}


def refuse_update_outside_run(variable: Any, arguments: Any) -> None:
    """Raises ConfigError if an optimizer applies a gradient outside `strategy.run`."""
    tensors = [each for each in arguments if tf.is_tensor(each)]
    if variable.trainable and any(not isinstance(each, tf.Variable) for each in tensors):
        raise hostopt.ConfigError(
            f"variable {variable.name!r}: an optimizer updates it outside strategy.run, where "
            f"ranks do not reduce gradients. {_REMEDY}"
        )


def check_variables(strategy: Any, variables: Any) -> None:
    """Raises ConfigError if a trained variable was created outside the strategy's scope."""
    for variable in variables:
        if not strategy.extended.variable_created_in_scope(variable):
            raise hostopt.ConfigError(
                f"variable {variable.name!r} was created outside strategy.scope(), so its initial "
                "value may differ between ranks. Create the model and the optimizer in the scope"
            )


def _may_differ_between_ranks(value: Any) -> bool:
    """Returns True if a value may depend on data of this rank, and is not reduced."""
    if isinstance(value, tf.IndexedSlices):
        return _may_differ_between_ranks(value.values) or _may_differ_between_ranks(value.indices)
    if not tf.is_tensor(value):
        return False
    if not hasattr(value, "graph"):  # eagerly, its origin is unknown
        return True
    origins = walk([value.op], lambda op: [] if is_same_on_all_ranks(op) else data_before(op))
    return any(map(_is_of_this_rank, origins))


def _is_of_this_rank(op: tf.Operation) -> bool:
    is_kind = op.type == "OptionalGetValue" or OF_THIS_RANK.match(op.type) is not None
    is_seeded = op.type.startswith("Stateless")
    return is_kind and not is_seeded and any(each.dtype != tf.resource for each in op.outputs)


def _compared(ring: ProcessRing, value: Any, variable: str) -> Any:
    """Compares a value that is assigned to a variable between the ranks."""
    if isinstance(value, tf.IndexedSlices):
        parts = _compared(ring, value.values, variable), _compared(ring, value.indices, variable)
        return tf.IndexedSlices(*parts, value.dense_shape)
    if value.dtype in (tf.string, tf.resource, tf.variant):
        return value

    def compare(array: Any) -> list[Any]:
        text = f"variable {variable!r} with the checksum {checksum(array):08x}"
        texts = ring.named.all_gather_bytes(text.encode(), _ASSIGNED)
        if len({*texts}) > 1:
            shown = ", ".join(f"rank {i}: {each.decode()}" for i, each in enumerate(texts))
            raise hostopt.CollectiveMismatchError(
                f"the ranks assign different values outside strategy.run ({shown}). Assign the "
                "same values in the same order on all ranks, such as those of a file or a seed"
            )
        return [array]

    with tf.device(HOST_DEVICE):
        outputs = [(value.dtype, value.shape)]
        (result,) = call(compare, [value], outputs, "HostCompared", _ASSIGNED, ring.communicator)
        return result
