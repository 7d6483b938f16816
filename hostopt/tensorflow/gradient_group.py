"""Gradients that are reduced together in each step, without any agreement while graphs are built.

A rank may trace a function earlier than others, or more often. So nothing is sent when the
operations of a group are built. The first step compares the gradients of the ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from hostopt.by_name.join import Announcement, Joining
from hostopt.by_name.named import NamedCollectives
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.wire_format import new_wire_format
from hostopt.errors import CollectiveMismatchError
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.tensorflow.reductions import Reducers, Reduction

_EXCHANGE = "exchange"
_OPTIONS = "options"


class GroupOptions(NamedTuple):
    """Options of a group of gradients.

    Each rank divides and multiplies by itself, so that the last three are only compared.
    """

    compression: str | None  # "fp16", "bf16", or None for the option `compression`
    bucket_bytes: int
    nonfinite: str | None
    op: str  # "average" or "sum"
    prescale_factor: float
    postscale_factor: float


class GradientGroup:
    """Sums of dense and sparse gradients over the ranks.

    All ranks must run the operations of a group in the same steps.

    Args:
      communicator: channel of this group alone; its name describes the group.
    """

    def __init__(
        self, communicator: Communicator, options: GroupOptions, named: NamedCollectives
    ) -> None:
        self._communicator = communicator
        self._named = named
        self._options = options
        self._reducers = Reducers(
            communicator,
            options.bucket_bytes,
            lambda: NonFiniteCheck(communicator, options.nonfinite),
            new_wire_format(options.compression),
            wrap=self._announced,
        )
        self._table: dict[str, str] = {}
        self._is_checked = False
        self._lock = threading.Lock()

    def sum(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Adds the operations that sum gradients; repeated calls are for the same gradients.

        Args:
          reductions: the gradients, in variable order, the same on all ranks but for the values.
        """
        self._table = describe(reductions, self._options)
        results = self._reducers.reduce(reductions)
        self._named.joining.replay_with(self._communicator.name, self._take_part)
        return results

    def _announced(self, reducer: Any) -> _Announced:
        name = self._communicator.name
        return _Announced(reducer, name, self._named.joining, self._check)

    def _take_part(self, announcement: Announcement) -> None:
        """Makes a call of other ranks after this rank has joined."""
        bucket = announcement.details.get("bucket")
        reducers = self._reducers
        (reducers.exchange if bucket is None else reducers.buckets).take_part(bucket)

    def _check(self) -> None:
        """Compares the gradients of all ranks, in the first step."""
        self._named.check_open()
        with self._lock:
            if not self._is_checked:
                table = _without_model_name(self._table)
                self._communicator.check_same(table, f"the {self._communicator.name}")
                self._is_checked = True

    def refuse(self, reason: str) -> None:
        """Counts a step that this rank refuses, and tells ranks that wait for it."""
        if not self._is_checked:
            self._communicator.refuse(reason)
            return
        for each in self._reducers.opened:
            each.refuse(reason)

    def close(self) -> None:
        """Ends the reductions, and frees the buffers."""
        for each in self._reducers.opened:
            each.close()


def describe(reductions: Sequence[Reduction], options: GroupOptions) -> dict[str, str]:
    """Describes the gradients of a group by name, with their order and the options."""
    names = [each.name for each in reductions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CollectiveMismatchError(
            f"the gradients have these names twice: {twice}. Give each variable its own name"
        )
    table = {each.name: f"number {i}, {each}" for i, each in enumerate(reductions)}
    return {**table, _OPTIONS: ", ".join(f"{k}={v}" for k, v in options._asdict().items())}


def _without_model_name(table: dict[str, str]) -> dict[str, str]:
    """Returns the table without the name of the model, if all paths of variables begin with it.

    Keras 3 puts it before the paths of a new Sequential, but not of one that is loaded from a
    file, and numbers it by the models of the process.
    """
    paths = [name.split("/") for name in table if name != _OPTIONS]
    if len({path[0] for path in paths}) > 1 or any(len(path) < 3 for path in paths):
        return table
    return {name.partition("/")[2] or name: value for name, value in table.items()}


class _Announced:
    """A reducer that announces its calls, and checks its group before the first one."""

    def __init__(self, reducer: Any, kind: str, joining: Joining, check: Any) -> None:
        self.communicator = reducer.communicator
        self._reducer = reducer
        self._kind = kind
        self._joining = joining
        self._check = check

    @property
    def kinds(self) -> Any:
        return self._reducer.kinds

    def reduce(self, bucket: int, arrays: Any) -> Any:
        self._begin_bucket(bucket)
        result = self._reducer.reduce(bucket, arrays)
        self._joining.end(self._kind, f"bucket {bucket}")
        return result

    def launch(self, bucket: int, arrays: Any) -> None:
        self._begin_bucket(bucket)
        self._reducer.launch(bucket, arrays)

    def wait(self, bucket: int) -> Any:
        result = self._reducer.wait(bucket)
        self._joining.end(self._kind, f"bucket {bucket}")
        return result

    def run(self, arrays: Any, rows: Any, weight: float) -> Any:
        self._joining.begin(self._kind, _EXCHANGE)
        self._check()
        result = self._reducer.run(arrays, rows, weight)
        self._joining.end(self._kind, _EXCHANGE)
        return result

    def take_part(self, bucket: int | None) -> None:
        """Makes a call with values that change nothing; None for the exchange."""
        self._check()
        if bucket is None:
            arrays, rows = self._reducer.zeros()
            self.run(arrays, rows, 1.0)
        elif self.communicator.on_one_host:
            self.reduce(bucket, self._reducer.zeros(bucket))
        else:
            self.launch(bucket, self._reducer.zeros(bucket))
            self.wait(bucket)

    def refuse(self, reason: str) -> None:
        self._reducer.refuse(reason)

    def close(self) -> None:
        self._reducer.close()

    def _begin_bucket(self, bucket: int) -> None:
        self._joining.begin(self._kind, f"bucket {bucket}", lambda: {"bucket": bucket})
        self._check()
