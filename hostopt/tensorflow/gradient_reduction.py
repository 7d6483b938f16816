"""Reduction of the gradients of an optimizer or a tape over the ranks of this process's ring.

A rank may trace a function earlier than others, or more often. So nothing is sent when the
operations of a group of gradients are built. The first step compares the gradients of the ranks.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hostopt import process_ring
from hostopt.by_name.join import Announcement
from hostopt.by_name.named import NamedCollectives
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.wire_format import new_wire_format
from hostopt.errors import ConfigError
from hostopt.gradients.nonfinite import ALLOW
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.calls import as_tensorflow_error, count_use, scale
from hostopt.tensorflow.compression import Compression, wire_format_of
from hostopt.tensorflow.reductions import Reducers, Reduction, describe
from hostopt.tensorflow.sparse import map_values, set_shape_of, sum_rows

DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """Reduces lists of gradients."""

    name: str  # of the gradients, the same on all ranks; "" until it is known
    op: ReduceOp = ReduceOp.AVERAGE
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    bucket_mb: float | None = None  # None for the option
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    nonfinite: str | None = DEFAULT
    ring: Callable[[], ProcessRing] = process_ring.current

    def __post_init__(self) -> None:
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ConfigError(
                f"gradients are to be reduced with {self.op.name}. Use AVERAGE or SUM"
            )

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces gradients over the ranks. A gradient may be None."""
        if self.sparse_as_dense:  # here, as a function does not know the static shape
            gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        results = list(gradients)
        left = [i for i, each in enumerate(gradients) if each is not None]
        for i in left:
            set_shape_of(gradients[i], getattr(variables[i], "shape", None))
        names = _unique_names([variables[i] for i in left])
        ring = self.ring()
        if tf.executing_eagerly() and ring.size > 1 and left:
            key = (self, *(_spec_of(gradients[i]) for i in left), *names)
            function = ring.keep(
                key, lambda: tf.function(self._reduce, autograph=False, reduce_retracing=True)
            )
            try:
                reduced = function([gradients[i] for i in left], names)
            except tf.errors.OpError:  # a text
                error = ring.communicator.transport.error
                if error is None:
                    raise
                raise as_tensorflow_error(error) from None
        else:
            reduced = self._reduce([gradients[i] for i in left], names)
        for i, each in zip(left, reduced):
            results[i] = each
        return results

    def refuse(self, error: ConfigError) -> None:
        """Makes all ranks fail that reduce gradients when this rank refuses its own.

        It counts as a step of each group, and as the first one of another.
        """
        ring = self.ring()
        if ring.size == 1 or ring.communicator.transport.error is not None:
            return
        numbers = ring.keep(("groups", self.name), dict)
        for number in numbers.values():
            name = self._group_name(number)
            group = ring.keep(name, lambda: None)
            if group is not None:
                group.refuse(f"the call {name!r}: {error.message}")
        numbers[object()] = number = len(numbers) + 1
        ring.named.refuse(self._group_name(number), error)

    def _group_name(self, number: int) -> str:
        return f"gradients of {self.name}" + (f" ({number})" if number > 1 else "")

    def _reduce(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        ring = self.ring()
        factor = self.postscale_factor
        if self.op is ReduceOp.AVERAGE:
            factor /= ring.size
        gradients = [map_values(lambda v: scale(v, self.prescale_factor), g) for g in gradients]
        if ring.size > 1 and gradients:
            gradients = self._sum(ring, gradients, names)
        else:  # the same norm as with several ranks, which sum rows before they travel
            gradients = [sum_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        return [map_values(lambda value: scale(value, factor), each) for each in gradients]

    def _sum(self, ring: ProcessRing, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        gradients = list(gradients)
        contexts: dict[int, Any] = {}  # of dense gradients that the program's compressor takes
        if wire_format_of(self.compression) is None:
            for i, gradient in enumerate(gradients):
                if not isinstance(gradient, tf.IndexedSlices):
                    gradients[i], contexts[i] = self.compression.compress(gradient)
        reductions = [
            Reduction(each, name, row_shape=_row_shape(each, name))
            for each, name in zip(gradients, names)
        ]
        sums = self._group(ring, reductions).sum(reductions)
        for i, context in contexts.items():
            sums[i] = self.compression.decompress(sums[i], context)
        return sums

    def _group(self, ring: ProcessRing, reductions: Sequence[Reduction]) -> GradientGroup:
        """Returns the group of these gradients. The groups of one name are numbered."""
        options = ring.communicator.transport.options
        if self.bucket_mb is not None:
            options = dataclasses.replace(options, bucket_mb=self.bucket_mb).with_environment()
        nonfinite = _nonfinite() if self.nonfinite == DEFAULT else self.nonfinite
        compression = wire_format_of(self.compression)
        compared = {
            "compression": compression,
            "bucket_bytes": options.bucket_bytes,
            "nonfinite": nonfinite,
            # by which each rank divides and multiplies itself
            "op": self.op.value,
            "prescale_factor": self.prescale_factor,
            "postscale_factor": self.postscale_factor,
        }
        numbers = ring.keep(("groups", self.name), dict)
        described = describe(reductions).items()
        table = {name: f"number {i}, {text}" for i, (name, text) in enumerate(described)}
        table[_OPTIONS] = ", ".join(f"{name}={value}" for name, value in compared.items())
        key = tuple(table.items())
        # operations of one group run once in a step: a second use in a function has another group
        use = count_use((self.name, key))
        number = numbers.setdefault((key, use), len(numbers) + 1)
        name = self._group_name(number)

        def new_group() -> GradientGroup:
            fields = options.bucket_bytes, nonfinite, new_wire_format(compression)
            return GradientGroup(ring.named, table, ring.communicator.duplicate(name), *fields)

        group: GradientGroup = ring.keep(name, new_group)
        return group


def _nonfinite() -> str:
    """Returns the reaction to NaN or Inf: none, as in one process, unless a variable is set."""
    nonfinite = os.environ.get("HOSTOPT_NONFINITE", ALLOW)
    if nonfinite == "skip":
        raise ConfigError(
            "HOSTOPT_NONFINITE is 'skip', which only estimator_ext supports. Use 'error' or "
            "'warn', or a LossScaleOptimizer"
        )
    return nonfinite


def _unique_names(variables: Sequence[Any]) -> list[str]:
    names = [_name_of(variable, index) for index, variable in enumerate(variables)]
    return [
        f"{name} (number {index})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _name_of(variable: Any, index: int) -> str:
    path = getattr(variable, "path", None)  # of a variable of Keras 3
    if isinstance(path, str):
        return path
    if isinstance(variable, tf.Variable):
        return str(variable.name).partition(":")[0]
    return f"source {index}"


def _spec_of(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return "rows", gradient.values.dtype, tuple(gradient.values.shape[1:])
    return gradient.dtype, tuple(gradient.shape)


def _row_shape(gradient: Any, name: str) -> tuple[int, ...]:
    if not isinstance(gradient, tf.IndexedSlices):
        return ()
    shape = gradient.values.shape[1:]
    if not shape.is_fully_defined():
        raise ConfigError(
            f"the gradient of {name!r} has rows of shape {shape}, wanted a static one. Set "
            "sparse_as_dense=True, or set_shape of the gradient"
        )
    return tuple(shape.as_list())


# -- groups of gradients that are reduced together in each step -------------------------------

_OPTIONS = "options"


class GradientGroup(Reducers):
    """Sums of dense and sparse gradients over the ranks.

    All ranks must run the operations of a group in the same steps. `table` describes the gradients
    and the options. The communicator is of this group alone, and its name describes it.
    """

    def __init__(self, named: NamedCollectives, table: dict[str, str], *fields: Any) -> None:
        super().__init__(*fields)
        self._named = named
        self._table = table
        self._is_checked = False
        self._lock = threading.Lock()

    def sum(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Adds the operations that sum gradients, the same on all ranks and in repeated calls."""
        results = self.reduce(reductions)
        self._named.joining.replay_with(self.communicator.name, self._take_part)
        return results

    def begin(self, bucket: int | None) -> None:
        """Announces a call to ranks that have joined; checks the group before the first call."""
        details = {} if bucket is None else {"bucket": bucket}
        channel = self.communicator.name
        self._named.joining.begin(channel, _name_of_call(bucket), lambda: details)
        self._named.check_open()
        with self._lock:
            if not self._is_checked:
                self.communicator.check_same(_without_model_name(self._table), f"the {channel}")
                self._is_checked = True

    def end(self, bucket: int | None) -> None:
        """Notes the end of a call."""
        self._named.joining.end(self.communicator.name, _name_of_call(bucket))

    def _take_part(self, announcement: Announcement) -> None:
        """Makes a call of other ranks, with values that change nothing: this rank has joined."""
        bucket = announcement.details.get("bucket")
        if bucket is None:
            arrays, rows = self.exchange.zeros()
            self.run_exchange(arrays, rows, 1.0)
        elif self.buckets.communicator.on_one_host:
            self.sum_inline(bucket, self.buckets.zeros(bucket))
        else:
            self.launch(bucket, self.buckets.zeros(bucket))
            self.wait(bucket)

    def refuse(self, reason: str) -> None:
        """Counts a step that this rank refuses, and tells ranks that wait for it."""
        for each in self.opened if self._is_checked else [self.communicator]:
            each.refuse(reason)

    def close(self) -> None:
        """Ends the reductions, and frees the buffers."""
        for each in self.opened:
            each.close()


def _without_model_name(table: dict[str, str]) -> dict[str, str]:
    """Returns the table without the name of the model, if all paths of variables begin with it.

    Keras 3 puts it before the paths of a new Sequential, but not of one that is loaded from a
    file, and numbers it by the models of the process.
    """
    paths = [name.split("/") for name in table if name != _OPTIONS]
    if len({path[0] for path in paths}) > 1 or any(len(path) < 3 for path in paths):
        return table
    return {name.partition("/")[2] or name: value for name, value in table.items()}


def _name_of_call(bucket: int | None) -> str:
    return "exchange" if bucket is None else f"bucket {bucket}"
