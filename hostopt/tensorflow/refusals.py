"""Refusals of Horovod's arguments and names that hostopt does not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hostopt import process_ring
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError


class _Adasum:
    """The operator of Horovod that `choose_op` refuses."""

    def __repr__(self) -> str:
        return "Adasum"


Adasum = _Adasum()

_MISSING = {
    "elastic": (
        "elastic training is not supported: ranks do not join or leave a running training. Save "
        "checkpoints, and start the program with `hostopt run --max-restarts`"
    ),
    "SyncBatchNormalization": (
        "SyncBatchNormalization is not supported: each rank normalizes with the statistics of its "
        "own batch. Use BatchNormalization, or layers that do not depend on the batch"
    ),
    **{
        name: f"{name} is not supported: a timeline covers a whole program. Set HOSTOPT_TIMELINE "
        "before init()"
        for name in ("start_timeline", "stop_timeline")
    },
}


def missing_attribute(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module, which says what to use instead of Horovod's names."""

    def get(name: str) -> Any:
        text = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(f"{text}: {_MISSING[name]}" if name in _MISSING else text)

    return get


def refuse_device(device: str, argument: str = "device") -> None:
    """Raises ConfigError if a device for reductions or broadcasts is given."""
    if device:
        raise ConfigError(f"{argument} is {device!r}, but hostopt works on the host. Leave it out")


def refuse_unsupported(
    process_set: Any,
    device_dense: str = "",
    device_sparse: str = "",
    num_groups: int = 0,
    groups: Any = None,
) -> None:
    """Raises ConfigError if a program gives arguments that are not supported."""
    refuse_device(device_dense, "device_dense")
    refuse_device(device_sparse, "device_sparse")
    refuse_process_set(process_set)
    if num_groups or groups is not None:
        raise ConfigError(
            "num_groups or groups is given, but gradients travel in buckets. Use bucket_cap_mb"
        )


def choose_op(op: Any, average: bool | None) -> ReduceOp:
    """Returns the operator of an all-reduce; `average` is an older way to choose it."""
    if average is not None:
        if op is not None:
            raise ConfigError("op and average are both given. Give op only")
        if not isinstance(average, bool):
            raise ConfigError(
                f"average is {average!r}, wanted True or False. Give other arguments by name"
            )
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if op is Adasum:
        raise ConfigError(
            "op is Adasum, which is not supported. Use op=Average, and the learning rate for the "
            "average over size() ranks"
        )
    if not isinstance(op, ReduceOp):
        names = ", ".join(each.name for each in ReduceOp)
        raise ConfigError(f"op is {op!r}, wanted one of {names} of ReduceOp. Give one of these")
    return op


_NO_PROCESS_SETS = (
    "process sets are not supported: every collective is over all ranks. Leave process_set out, "
    "or start a separate training for each set"
)


class ProcessSet:
    """A set of ranks, as Horovod names it. The only one is `global_process_set`.

    Args:
      ranks_or_comm: must not be given.

    Raises:
      ConfigError: `ranks_or_comm` is given.
    """

    process_set_id = 0

    def __init__(self, ranks_or_comm: Any = None) -> None:
        if ranks_or_comm is not None:
            raise ConfigError(_NO_PROCESS_SETS)

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks."""
        return list(range(self.size()))

    def size(self) -> int:
        """Returns the number of ranks."""
        return process_ring.current().size

    def rank(self) -> int:
        """Returns this rank."""
        return process_ring.current().rank

    def included(self) -> bool:
        """Returns True: this rank is part of the set."""
        process_ring.current()
        return True

    def __str__(self) -> str:
        return "ProcessSet(of all ranks)"


global_process_set = ProcessSet()


def add_process_set(process_set: Any) -> ProcessSet:
    """Refuses a further process set, with a ConfigError."""
    raise ConfigError(_NO_PROCESS_SETS)


def remove_process_set(process_set: Any) -> bool:
    """Refuses to remove a process set; see `add_process_set`."""
    raise ConfigError(_NO_PROCESS_SETS)


def refuse_process_set(process_set: Any) -> None:
    """Raises ConfigError if a process set is given, unless it is the one of all ranks."""
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise ConfigError(_NO_PROCESS_SETS)


def refuse_process_set_id(process_set_id: int) -> None:
    """Raises ConfigError unless a number is the ID of the process set of all ranks."""
    if process_set_id != ProcessSet.process_set_id:
        raise ConfigError(_NO_PROCESS_SETS)
