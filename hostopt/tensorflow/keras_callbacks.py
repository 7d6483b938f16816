"""Methods of the callbacks, for a subclass that is also a `Callback` of Keras 2 or Keras 3."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostopt.errors import ConfigError
from hostopt.tensorflow.keras_models import check_execution, is_built, variables_of
from hostopt.tensorflow.refusals import refuse_device
from hostopt.tensorflow.variables import allgather_object, broadcast_variables


class BroadcastVariables:
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
        if local_variables is None or isinstance(local_variables, (list, tuple)):
            self._local_variables = list(local_variables or [])
        else:
            self._local_variables = [local_variables]
        self._is_done = False

    def register_local_var(self, var: Any) -> None:
        """Makes a variable keep the values of its rank."""
        self._local_variables.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the variables if every rank has them already."""
        del logs
        check_execution(self.model)
        if not self._is_done and all(allgather_object(is_built(self.model), name="models built")):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts the variables after the first batch, unless that is done."""
        del batch, logs
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        variables = variables_of(self.model)
        for local in self._local_variables:
            variables = [each for each in variables if each is not local]
        broadcast_variables(variables, self._root_rank)
        self._is_done = True


class AverageMetrics:
    """Averages the metrics of an epoch over the ranks, for the callbacks after this one."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        refuse_device(device)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the metrics by their averages."""
        del epoch
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
