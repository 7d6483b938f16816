"""Compares the order of the data of all ranks, before each takes its shard by position.

Where the order may be lost, as in parallel calls, it is fixed first. Then the ranks compare the
numbers with which their transformations were called, such as seeds, and the first elements at the
points of the pipeline (see `pipeline`). Generators compare their elements while they are read.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import constant_of, options_in_graph, variant_tensor
from estimator_ext.errors import UnsupportedError
from estimator_ext.pipelines.pipeline import Pipeline, kind_of, without_seed
from hostopt.collectives.communicator import all_gather_json
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error

_log = tf.get_logger()

_END = -1  # instead of a checksum
COUNT, LIMIT_S = 64, 0.25  # elements to compare, and seconds after which fewer are enough
_TEXTS, _NUMBERS = 16, 4096  # in a sample of a tensor
_NOT_SAMPLED = (tf.variant, tf.resource)
Compare = Callable[[list[int]], None]


@dataclass(eq=False)
class OrderCheck:
    """Compares the data of the ranks."""

    communicator: hostopt.Communicator  # for this object alone (a `duplicate`)
    remedy: str  # what to do about different orders, for the error

    def __post_init__(self) -> None:
        self._of_generators: list[hostopt.Communicator] = []

    def in_one_order(
        self, dataset: tf.data.Dataset, config: tf.compat.v1.ConfigProto | None = None
    ) -> tuple[tf.data.Dataset, int]:
        """Checks that all ranks have the same elements in the same order. Collective.

        Returns the dataset, in which parallel calls keep their order; a random number of rank 0.
        """
        pipeline = Pipeline(dataset)
        problem = next(pipeline.problems(), "")
        numbers: Numbers = []
        first: First = []
        if pipeline.in_graph:
            changed = pipeline.make_deterministic()
            if changed and self.communicator.rank == 0:
                _log.info("parallel calls keep their order, as all ranks need it: %s", changed)
        if not problem:
            read = _read_in_graph if pipeline.in_graph else _read_eagerly
            numbers, first = read(pipeline, config)
            problem = _without_seed(dict(numbers))
        self._watch(pipeline)
        seed = self._compare(self.communicator, first, numbers, problem)
        return _kept_in_order(dataset), seed

    def check_rows(self, columns: Sequence[Any]) -> None:
        """Checks that all ranks have columns which begin with the same rows. Collective."""
        samples = [np.asarray(each[:COUNT]) for each in columns]
        self._compare(self.communicator, [("rows", [checksum(samples)])])

    def _watch(self, pipeline: Pipeline) -> None:
        """Has generators compare their first elements when they are read."""
        for index, state in enumerate(pipeline.generators):
            if index == len(self._of_generators):
                channel = self.communicator.duplicate(f"elements of generator {index}")
                self._of_generators.append(channel)
            channel = self._of_generators[index]

            def compare(checksums: list[int], channel: hostopt.Communicator = channel) -> None:
                self._compare(channel, [("from_generator()", checksums)])

            if not isinstance(state._generator, PeekedGenerator):
                state._generator = PeekedGenerator(state._generator)
            state._generator.compare_next(abort_on_error(channel, compare))

    def _compare(
        self,
        channel: hostopt.Communicator,
        first: First,
        numbers: Sequence[tuple[str, int]] = (),
        problem: str = "",
    ) -> int:
        """Compares what the ranks know of their data; returns a random number of rank 0."""
        seed = secrets.randbits(31)
        report = {"problem": problem, "numbers": numbers, "first": first, "seed": seed}
        reports = all_gather_json(channel, report, "the order of the data")
        for rank, each in enumerate(reports):
            found = each["problem"]
            if not found and (difference := _difference(reports[0], each)):
                found = f"{difference}. {self.remedy}"
            if found:
                raise UnsupportedError(
                    f"the ranks would take shards of other data, or of another order: on rank "
                    f"{rank} {found}"
                )
        return int(reports[0]["seed"])


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Describes the first difference between the reports of two ranks; "" if there is none."""
    for (name, value), (other_name, other_value) in zip(one["numbers"], other["numbers"]):
        if name != other_name:
            return f"the dataset has {other_name!r} where rank 0 has {name!r}"
        if value != other_value:
            return f"the dataset has {other_value} for {name!r}, and {value} on rank 0"
    if any(len(one[key]) != len(other[key]) for key in ("numbers", "first")):
        return "the dataset has other transformations than on rank 0"
    for (name, checksums), (_, others) in zip(one["first"], other["first"]):
        for index, (a, b) in enumerate(zip(checksums, others)):
            if a != b:
                return f"element {index} of {name} is not that of rank 0"
    return ""


def _without_seed(numbers: dict[str, int]) -> str:
    for name, value in numbers.items():
        if name.endswith(": seed") and value == numbers[f"{name}2"] == 0:
            return without_seed(name.partition(" ")[0])
    return ""


def _kept_in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    with options_in_graph():
        if dataset.options().deterministic is not False:
            return dataset
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


# -- first elements ------------------------------------------------------------------------

Numbers = list[tuple[str, int]]
First = list[tuple[str, list[int]]]


def _read_eagerly(pipeline: Pipeline, config: None) -> tuple[Numbers, First]:
    numbers = [(name, int(value)) for name, value in pipeline.scalars()]
    first: First = []
    with tf.device(HOST_DEVICE):
        for point in pipeline.readable():
            elements = ([each.numpy() for each in samples_of(element)] for element in point)
            first.append((kind_of(point), _checksums(elements)))
    return numbers, first


def _read_in_graph(
    pipeline: Pipeline, config: tf.compat.v1.ConfigProto | None
) -> tuple[Numbers, First]:
    """Reads in a session of its own, if at all, so that the training finds all elements."""
    scalars, points = dict(pipeline.scalars()), pipeline.readable()
    numbers = {name: _static_value(value) for name, value in scalars.items()}
    first = [_static_checksums(point) for point in points]
    unknown = {name: scalars[name] for name, value in numbers.items() if value is None}
    unread = [index for index, checksums in enumerate(first) if checksums is None]
    if unknown or unread:
        with tf.name_scope("data_order"), tf.control_dependencies(None), tf.device(HOST_DEVICE):
            iterators = [_iterator(_sampled(points[index])) for index in unread]
            tables = [tf.compat.v1.tables_initializer()] if pipeline.reads_tables else []
        with tf.compat.v1.Session(config=config) as session, _logged_errors():
            session.run(tables)
            values = session.run(unknown)
            numbers.update((name, int(value)) for name, value in values.items())
            for index, (begin, following) in zip(unread, iterators):
                session.run(begin)
                first[index] = _checksums(_run(session, following))
    known = [(name, value) for name, value in numbers.items() if value is not None]
    return known, [(kind_of(point), sums or []) for point, sums in zip(points, first)]


def _static_value(tensor: tf.Tensor) -> int | None:
    if tensor.op.type == "SelectV2":  # tf.data replaces seeds that are 0
        tensor = tensor.op.inputs[2]
    value = constant_of(tensor)
    return None if value is None else int(value)


def _static_checksums(point: tf.data.Dataset) -> list[int] | None:
    """Returns checksums of constants, which a session would copy as a whole."""
    if kind_of(point) not in ("Tensor", "TensorSlice"):
        return None
    values = list(map(constant_of, variant_tensor(point).op.inputs))
    if any(value is None for value in values):
        return None
    rows = zip(*values) if kind_of(point) == "TensorSlice" else iter([values])
    return _checksums([sample_of(value) for value in row] for row in rows)


def _run(session: tf.compat.v1.Session, following: list[tf.Tensor]) -> Iterator[Any]:
    with contextlib.suppress(tf.errors.OutOfRangeError):
        while True:
            yield session.run(following)


@contextlib.contextmanager
def _logged_errors() -> Iterator[None]:
    """Logs an error of the data, which the training will raise, too."""
    try:
        yield
    except tf.errors.OpError as error:
        _log.warning("not all of the first elements can be compared: %s", error.message)


def _checksums(elements: Iterator[Any]) -> list[int]:
    found: list[int] = []
    with _logged_errors():
        for element in _first(itertools.chain(elements, [None])):
            found.append(_END if element is None else checksum(element))
    return found


def _first(elements: Iterator[Any]) -> Iterator[Any]:
    deadline_s = time.monotonic() + LIMIT_S
    for element in itertools.islice(elements, COUNT):
        yield element
        if time.monotonic() > deadline_s:
            return


def _sampled(dataset: tf.data.Dataset) -> tf.data.Dataset:
    @tf.autograph.experimental.do_not_convert
    def sample(*element: Any) -> tuple[tf.Tensor, ...]:
        return tuple(samples_of(element)) or (tf.zeros([0]),)

    return dataset.map(sample)


def _iterator(dataset: tf.data.Dataset) -> tuple[tf.Operation, list[tf.Tensor]]:
    """Returns the operation that begins to read a dataset, and the tensors of the next element.

    Unlike the iterators of tf.data it is in no collection, and its shapes name no batch size.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    kinds: dict[str, Any] = {"output_types": [spec.dtype for spec in specs]}
    kinds["output_shapes"] = [tf.TensorShape(None) for _ in specs]
    iterator = tf.raw_ops.IteratorV2(shared_name="", container="", **kinds)
    begin = tf.raw_ops.MakeIterator(dataset=variant_tensor(dataset), iterator=iterator)
    return begin, list(tf.raw_ops.IteratorGetNext(iterator=iterator, **kinds))


# -- generators ------------------------------------------------------------------------------


class PeekedGenerator:
    """A generator function that gives the checksums of its first elements to a function.

    It is called as often as without the comparison, and passes on the same elements.
    """

    def __init__(self, generator: Callable[..., Any]) -> None:
        self._generator = generator
        self._compare: Compare | None = None
        self._lock = threading.Lock()

    def compare_next(self, compare: Compare) -> None:
        """Sets a function that takes the first checksums of the next call, or raises an error."""
        with self._lock:
            self._compare = compare

    def __call__(self, *arguments: Any) -> Iterator[Any]:
        """Yields the elements."""
        with self._lock:
            compare, self._compare = self._compare, None
        elements = iter(self._generator(*arguments))
        if compare is not None:
            held, checksums = _begin(elements)
            compare(checksums)
            elements = itertools.chain(held, elements)
        yield from elements


def _begin(elements: Iterator[Any]) -> tuple[list[Any], list[int]]:
    """Takes the first elements; returns copies, as a generator may use an array again."""
    held, checksums = [], []
    for element in _first(elements):
        held.append(tf.nest.map_structure(_copy, element))
        checksums.append(checksum(tf.nest.flatten(element, expand_composites=True)))
    return held, checksums


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


# -- samples of a batch, whose checksum shows whether two batches are the same -------------------


def samples_of(batch: Any) -> list[tf.Tensor]:
    """Returns the beginning of each tensor of a batch, of shape [samples].

    Sparse and ragged tensors count as their parts; datasets, tables and the like have no samples.
    """
    tensors = filter(tf.is_tensor, tf.nest.flatten(batch, expand_composites=True))
    return [
        tf.reshape(each, [-1])[: _TEXTS if each.dtype == tf.string else _NUMBERS]
        for each in tensors
        if each.dtype not in _NOT_SAMPLED
    ]


def sample_of(array: Any) -> np.ndarray[Any, Any]:
    """Returns what `samples_of` returns for a tensor of this value."""
    values = np.asarray(array)
    return values.reshape(-1)[: _TEXTS if values.dtype.kind in "OSU" else _NUMBERS]


def checksum(samples: Iterable[Any]) -> int:
    """Returns a CRC-32, in which strings count from their last slash on.

    A file's directory may differ between machines.
    """
    value = 0
    for array in map(np.asarray, samples):
        is_text = array.dtype.kind in "OSU"
        data = b"\0".join(map(_name_of_file, array.flat)) if is_text else array.tobytes()
        value = zlib.crc32(data, value)
    return value


def _name_of_file(text: Any) -> bytes:
    data = text if isinstance(text, bytes) else str(text).encode()
    return data.rpartition(b"/")[2]
