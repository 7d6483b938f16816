"""Horovod's API for Keras: what is the same for Keras 2 and Keras 3."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hostopt import process_ring
from hostopt import tensorflow as hvd
from hostopt.errors import ConfigError
from hostopt.tensorflow import _names
from hostopt.tensorflow._names import *  # noqa: F403 - the same names
from hostopt.tensorflow._names import __all__ as __all__  # noqa: PLC0414 - mypy does not see `+=`
from hostopt.tensorflow.optimizer import reducing_part
from hostopt.tensorflow.refusals import refuse_device
from hostopt.tensorflow.variables import allgather_object, broadcast_variables
from hostopt.tensorflow.wrapping import variables_of_layers

__all__ = ["PartialDistributedOptimizer", "allgather", "allreduce", "broadcast", "reducescatter"]  # noqa: F811
__all__ += _names.__all__
_T = TypeVar("_T")


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of one rank."""
    return hvd.broadcast(value, root_rank, name)


# -- Horovod's functions for TensorFlow, with the order that their parameters have for Keras ----


def reordered(
    order: str, *others: Callable[..., Any]
) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Returns a decorator that puts the parameters of a function in another order.

    Args:
      order: names of the parameters; those after a "*" are given by name only. The first one may
        have another name than in the function. Those that are left out keep their defaults.
      others: functions to which the function passes its other arguments.
    """
    positional, _, by_name = order.partition(" * ")
    first, *names = positional.split()

    def decorate(function: Callable[..., _T]) -> Callable[..., _T]:
        known: dict[str, inspect.Parameter] = {}
        for each in (*others, function):
            known.update(inspect.signature(each).parameters)
        parameters = [inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += [known[name] for name in names]
        parameters += [
            known[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in by_name.split()
        ]
        signature = inspect.Signature(parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> _T:
            arguments = signature.bind(*args, **kwargs).arguments
            return function(arguments.pop(first), **arguments)

        vars(call)["__signature__"] = signature
        return call

    return decorate


OPTIMIZER = (
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op"
)

allgather = reordered("value name")(hvd.allgather)
reducescatter = reordered("value name op")(hvd.reducescatter)
allreduce = reordered("value name average prescale_factor postscale_factor op compression")(
    hvd.allreduce
)

DistributedOptimizer = reordered(
    f"{OPTIMIZER} backward_passes_per_step average_aggregated_gradients num_groups groups "
    "process_set scale_local_gradients bucket_cap_mb"
)(hvd.DistributedOptimizer)


@reordered(
    f"{OPTIMIZER} groups process_set local_layers scale_local_gradients", hvd.DistributedOptimizer
)
def PartialDistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any, local_layers: Any = None, **arguments: Any
) -> Any:
    """Makes an optimizer reduce the gradients of all layers except some.

    See `hostopt.tensorflow.DistributedOptimizer` for the other arguments.

    Args:
      local_layers: layer of Keras, or several, which have their variables.
    """
    variables = variables_of_layers(local_layers)
    optimizer = hvd.DistributedOptimizer(optimizer, **arguments)
    for variable in variables:
        reducing_part(optimizer).register_local_var(variable)
    return optimizer


# -- models ---------------------------------------------------------------------------------


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
        """
        objects = {each.__name__: each for each in custom_optimizers or []}
        objects.update(custom_objects or {})
        model = keras.models.load_model(filepath, custom_objects=objects)
        if getattr(model, "optimizer", None) is not None:
            hvd.DistributedOptimizer(model.optimizer, compression=compression)
        return model

    return load_model


# -- callbacks --------------------------------------------------------------------------------


class BroadcastGlobalVariablesCallback:
    """Gives all ranks the weights and the state of the optimizer of one rank.

    That is before the first batch if the models of all ranks have their variables then, and
    otherwise after it.

    Args:
      local_variables: variables, or one, that keep the values of their rank; None for none.
    """

    model: Any

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        refuse_device(device)
        self._root_rank = root_rank
        self._local_variables = [] if local_variables is None else tf.nest.flatten(local_variables)
        self._is_done = False

    def register_local_var(self, var: Any) -> None:
        """Makes a variable keep the values of its rank."""
        self._local_variables.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the variables if every rank has them already."""
        if not tf.executing_eagerly():
            raise ConfigError(
                "eager execution is disabled, and the callbacks for Keras need it. Enable it, or "
                "use BroadcastGlobalVariablesHook in a session"
            )
        if self.model.jit_compile:
            raise ConfigError(
                "the model is compiled by XLA, which cannot compile reductions over ranks. Call "
                "model.compile with jit_compile=False"
            )
        if not self._is_done and all(allgather_object(_is_built(self.model), name="models built")):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts the variables after the first batch, unless that is done."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        of_optimizer = self.model.optimizer.variables
        if callable(of_optimizer):  # in Keras 2
            of_optimizer = of_optimizer()
        variables = [*self.model.weights, *of_optimizer]  # no seeds of random numbers
        local = {id(each) for each in self._local_variables}
        broadcast_variables([v for v in variables if id(v) not in local], self._root_rank)
        self._is_done = True


class MetricAverageCallback:
    """Averages the metrics of an epoch over the ranks, for the callbacks after this one."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        refuse_device(device)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the metrics by their averages."""
        if logs is None:
            return
        own = {name: np.asarray(value, np.float64) for name, value in logs.items()}
        gathered = allgather_object(own, name="metrics")
        for rank, each in enumerate(gathered):
            if set(each) != set(own):
                raise ConfigError(
                    f"this rank has the metrics {sorted(own)}, but rank {rank} has "
                    f"{sorted(each)}. Give fit and compile the same arguments on all ranks"
                )
        for name in own:
            average = np.mean([each[name] for each in gathered], axis=0)
            logs[name] = float(average) if average.ndim == 0 else average


def _is_built(model: Any) -> bool:
    """Returns True if a model and its optimizer have all their variables, which this creates."""
    if not model.built:
        return False
    optimizer = model.optimizer
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    else:
        optimizer._create_all_weights(model.trainable_variables)
    return True


class LearningRateScheduleCallback:
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    Args:
      initial_lr: the initial learning rate.
      multiplier: a function that returns the factor for an epoch, which counts from 0 and has a
        fraction unless `staircase` is True. A number is the factor from each epoch to the next:
        the learning rate is initial_lr * multiplier ** (epoch - start_epoch).
      start_epoch: first epoch in which this callback sets the learning rate.
      end_epoch: epoch from which on it does not any more; None for no end.
      staircase: True sets it at the start of epochs only.
      momentum_correction: True multiplies the momentum of the first step with another learning
        rate by new / old learning rate.
      steps_per_epoch: number of batches in an epoch; None takes it from `fit`.
    """

    model: Any
    params: Any

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase
        self._multiplier = multiplier
        self._epoch = 0
        self._steps = 1
        self._momentum: tuple[tf.Variable, float] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the optimizer, and finds the number of steps per epoch."""
        steps = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not steps:
            raise ConfigError(
                "the number of batches in an epoch is not known. Give "
                f"{type(self).__name__} the argument steps_per_epoch"
            )
        self._steps = steps or 1
        optimizer = _inner(self.model.optimizer)
        if isinstance(optimizer.get_config().get("learning_rate"), dict):
            raise ConfigError(
                f"{type(self).__name__} cannot set the learning rate of an optimizer that has a "
                "LearningRateSchedule. Give the optimizer a number"
            )
        if self.momentum_correction:
            self._momentum = _momentum_of(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate, and the momentum for this batch."""
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.multiplier(self._epoch + batch / self._steps))
        elif batch == 0:
            self._set(self.multiplier(self._epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restores the momentum."""
        self._scale_momentum(1.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the metrics."""
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def multiplier(self, epoch: float) -> float:
        """Returns the factor in an epoch."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def _set(self, factor: float) -> None:
        old, new = self._learning_rate(), self.initial_lr * factor
        self.model.optimizer.learning_rate = new
        if old:
            self._scale_momentum(new / old)

    def _scale_momentum(self, factor: float) -> None:
        if self._momentum is not None:
            variable, value = self._momentum
            variable.assign(value * factor)

    def _learning_rate(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / size to `initial_lr`, batch by batch.

    Args:
      initial_lr: learning rate after the warm-up; in most programs the rate of one process times
        size.
      steps_per_epoch: number of batches in an epoch; None takes it from `fit`.
      verbose: 1 prints a line at the end, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._factor,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the metrics, and prints it if the warm-up has ended."""
        super().on_epoch_end(epoch, logs)
        is_last = epoch + 1 == self.end_epoch
        if self.verbose and is_last and process_ring.current().rank == 0:
            print(f"\nEpoch {epoch + 1}: warm-up ended at learning rate {self._learning_rate():g}")

    def _factor(self, epoch: float) -> float:
        """Returns the factor, which is 1 in the last batch of the warm-up."""
        first = 1 / process_ring.current().size
        done = (epoch + 1 / self._steps) / self.warmup_epochs
        return first + (1 - first) * done


def _inner(optimizer: Any) -> Any:
    """Returns the optimizer inside a LossScaleOptimizer, or else the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _momentum_of(model: Any) -> tuple[tf.Variable, float] | None:
    """Returns the variable and the value of the momentum that a model trains with, if any.

    Optimizers of Keras read a number once, when the function for a training step is traced. So
    a number becomes a variable, and that function is made anew.
    """
    optimizer = _inner(model.optimizer)
    momentum = getattr(optimizer, "momentum", None)
    if isinstance(momentum, tf.Variable):  # of a legacy optimizer
        return momentum, float(momentum.numpy())
    if not momentum:
        return None
    if not isinstance(momentum, _VariableNumber):
        momentum = optimizer.momentum = _VariableNumber(momentum)
        model.make_train_function(force=True)
    return momentum.variable, float(momentum)


class _VariableNumber(float):
    """A number that is a variable in graphs, and keeps its first value everywhere else.

    So a model that is saved has the momentum that the program gave.
    """

    dtype = "float32"
    variable: tf.Variable

    def __new__(cls, value: float) -> _VariableNumber:
        self = super().__new__(cls, value)
        self.variable = tf.Variable(float(value), dtype=tf.float32, trainable=False)
        return self

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.cast(self.variable, dtype or tf.float32, name)


def callbacks_for(keras: Any, module: str) -> list[Any]:
    """Returns the callbacks of a module for models of one Keras."""
    is_keras_3 = hasattr(keras, "ops")

    def set_model(self: Any, model: Any) -> None:
        if hasattr(model, "stateless_call") != is_keras_3:
            other = {True: ("3", "hostopt.tensorflow.keras"), False: ("2", "hostopt.keras")}
            wanted, instead = other[is_keras_3]
            raise ConfigError(
                f"a callback for Keras {wanted} is given to a model of {type(model).__module__}. "
                f"Import {instead} instead"
            )
        keras.callbacks.Callback.set_model(self, model)

    classes = (
        BroadcastGlobalVariablesCallback,
        MetricAverageCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
    )
    return [
        type(
            methods.__name__,
            (methods, keras.callbacks.Callback),
            {"__module__": module, "__doc__": methods.__doc__, "set_model": set_model},
        )
        for methods in classes
    ]
