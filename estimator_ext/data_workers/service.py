"""The training dataset of the ranks, prepared by data workers: RunConfig(data_service=...)."""

from __future__ import annotations

import contextlib
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import options_in_graph, variant_tensor
from estimator_ext.data_workers.watch import DataWatch
from estimator_ext.data_workers.worker import bypass_proxies, check_reach
from estimator_ext.errors import UnsupportedError
from estimator_ext.graphs.walks import Nodes, library_of, walk, with_called
from estimator_ext.pipelines.divided_pipeline import (
    INSTEAD,
    check_transformations,
    describe_values,
    divisible,
    is_source,
    sources_of,
)
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()

DISTRIBUTED, OFF = "distributed_epoch", "off"
# "dynamic" is the newer name of TensorFlow for the same
MODES = (DISTRIBUTED, "dynamic", OFF)
# Batches that a rank holds ready. With more, the first rank to start would take too many.
_PREFETCHED = 2
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_VARIABLES = re.compile(r"VarHandleOp|Variable(V2)?|Mutable\w*HashTable\w*")
_SEEDED = re.compile("Random|Shuffle")  # operations whose constants are seeds and sizes of buffers


def mode_of(config: Any, cluster: hostopt.Cluster) -> str:
    """Returns how the training data are prepared: "distributed_epoch" or "off"."""
    mode = getattr(config, "data_service", None)
    if mode is None:
        return DISTRIBUTED if cluster.data else OFF
    if mode == OFF:
        return OFF
    if not cluster.data:
        raise hostopt.ConfigError(
            f"RunConfig.data_service is {mode!r}, and there are no data workers. Start the "
            "training with `hostopt run --data-workers K`, or leave data_service out"
        )
    return DISTRIBUTED


class DataService:
    """The data workers of a training, which share one job of all ranks."""

    def __init__(self, strategy: HostOffloadStrategy) -> None:
        self._communicator = strategy.communicator
        self._cluster = strategy.cluster
        self._is_local = check_reach(strategy.cluster, strategy.options)
        bypass_proxies(strategy.cluster)
        self.watch = DataWatch(self._communicator, self._cluster.data, strategy.options)

    def prepare(self, data: Any, config: Any) -> tf.data.Dataset:
        """Has the data workers prepare a dataset, of which one rank gets each element.

        Collective: all ranks must call it. The ranks must not have taken shards.
        """
        check_dataset(data, len(self._cluster.data))
        parts = {**sources_of(data), **transformations_of(data)}
        self._communicator.check_same(
            {"element_spec": repr(data.element_spec), **parts},
            "the datasets of input_fn (data workers prepare the one of rank 0 for all ranks)",
        )
        self.watch.wait_for_all()
        name = secrets.token_hex(8) if self._communicator.rank == 0 else ""
        if name:
            self._register(data, name, config.session_config)
        # of this training and attempt only; the others wait until the dispatcher knows it
        names = self._communicator.all_gather_bytes(name.encode(), "the job of the data")
        name = names[0].decode()
        with tf.device(HOST_DEVICE):
            prepared = tf.data.experimental.service.from_dataset_id(
                DISTRIBUTED,
                self._service,
                name,
                element_spec=data.element_spec,
                job_name=name,
                max_outstanding_requests=max(_PREFETCHED, len(self._cluster.data)),
            )
            return prepared.prefetch(getattr(config, "prefetch_depth", None) or _PREFETCHED)

    @property
    def _service(self) -> str:
        return f"grpc://{self._cluster.data[0].address}"

    def _register(self, data: tf.data.Dataset, name: str, config: Any) -> None:
        with tf.device(HOST_DEVICE), options_in_graph():
            register = tf.data.experimental.service.register_dataset(
                self._service,
                divisible(data),
                # on one machine, elements are copied faster than they are compressed
                compression=None if self._is_local else "AUTO",
                dataset_id=name,
            )
        try:
            with tf.compat.v1.Session(config=config) as session:
                session.run(tf.compat.v1.tables_initializer())
                session.run(register)
        except tf.errors.OpError as error:
            raise UnsupportedError(
                f"the data workers cannot prepare the dataset of input_fn: {error.message}. "
                f"{INSTEAD}"
            ) from error
        _log.info("%d data workers prepare the data (%s)", len(self._cluster.data), DISTRIBUTED)


@contextlib.contextmanager
def data_service(strategy: HostOffloadStrategy, config: Any) -> Iterator[DataService | None]:
    """Scope of a training in which the data workers are watched.

    Collective: all ranks must enter it. Yields None if each rank prepares its data itself.
    """
    mode = mode_of(config, strategy.cluster)
    if strategy.cluster.data:
        strategy.communicator.check_same({"RunConfig.data_service": mode}, "the data workers")
    if mode == OFF:
        yield None
        return
    service = DataService(strategy)
    with service.watch:
        yield service


# -- the pipeline that data workers prepare --------------------------------------------------


def check_dataset(data: Any, workers: int) -> None:
    """Checks that data workers prepare a dataset as one process would."""
    if not isinstance(data, tf.data.Dataset):
        raise UnsupportedError(
            f"input_fn returned a {type(data).__name__}, wanted a tf.data.Dataset: data workers "
            "prepare only a dataset. Return one, or set RunConfig.data_service='off'"
        )
    operations = walk([variant_tensor(data).op])
    check_transformations(operations, workers)
    called = with_called([op.node_def for op in operations], library_of(operations[0].graph))
    for kind, name in ((node.op, node.name) for nodes in called for node in nodes):
        if kind in _PYTHON:
            raise UnsupportedError(
                f"the dataset of input_fn calls a Python function (operation {name!r} of type "
                f"{kind}), as from_generator, py_function and numpy_function do. Data workers are "
                f"other processes and cannot call it. {INSTEAD}"
            )
        if _VARIABLES.fullmatch(kind):
            raise UnsupportedError(
                f"the dataset of input_fn reads {name!r} of type {kind}, whose value on the ranks "
                f"data workers do not have. {INSTEAD}"
            )


def transformations_of(data: tf.data.Dataset) -> dict[str, str]:
    """Describes the transformations of a dataset, which must be the same on all ranks.

    Returns:
      For each transformation: its type, its constants, and a checksum of the types of its
      operations. The operations of its functions are included. Seeds and the order of values are
      left out.
    """
    operations = walk([variant_tensor(data).op])
    library = library_of(operations[0].graph)
    transformations = [op for op in operations if _makes_dataset(op) and not is_source(op)]
    return {
        f"transformation {index}": _describe(op, library)
        for index, op in enumerate(transformations)
    }


def _makes_dataset(op: tf.Operation) -> bool:
    return any(tensor.dtype == tf.variant for tensor in op.outputs)


def _describe(op: tf.Operation, library: Mapping[str, Nodes]) -> str:
    def before(each: tf.Operation) -> list[tf.Operation]:
        is_another = each is not op and _makes_dataset(each)
        return [] if is_another else [tensor.op for tensor in each.inputs]

    own = [each for each in walk([op], before) if each is op or not _makes_dataset(each)]
    called = with_called([each.node_def for each in own], library)
    values, kinds = [], []
    for nodes in called:
        kinds += [node.op for node in nodes if node.op not in library]
        seeded = _before_seeded(nodes)
        values += [
            describe_values(tf.make_ndarray(node.attr["value"].tensor))
            for node in nodes
            if node.op == "Const" and node.name not in seeded
        ]
    checksum = zlib.crc32(" ".join(kinds).encode())
    constants = ", ".join(values) or "none"
    return f"{op.type} of {len(kinds)} operations ({checksum:08x}) with constants: {constants}"


def _before_seeded(nodes: Nodes) -> set[str]:
    """Returns the names of nodes whose values become seeds, or sizes of buffers."""
    by_name = {node.name: node for node in nodes}
    found: set[str] = set()
    todo = [node for node in nodes if _SEEDED.search(node.op)]
    while todo:
        for name in (each.lstrip("^").partition(":")[0] for each in todo.pop().input):
            node = by_name.get(name)
            if node is not None and name not in found and "Dataset" not in node.op:
                found.add(name)
                todo.append(node)
    return found
