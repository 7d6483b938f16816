"""Shards the data of an input_fn that does not shard them itself; a seed that all ranks share."""

from __future__ import annotations

import contextlib
import re
import secrets
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext import _tf_estimator
from estimator_ext._tf_private import (
    AutoShardDataset,
    DatasetV1,
    DatasetV1Adapter,
    SeedOfRanks,
    current_seed,
    options_in_graph,
    seed_hidden,
    set_eager_seed,
    variant_tensor,
)
from estimator_ext.errors import UnsupportedError
from estimator_ext.graphs.walks import walk
from estimator_ext.pipelines.data_order import OrderCheck
from hostopt.options import shown
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()

_AutoShard = tf.data.experimental.AutoShardPolicy
POLICIES = {"data": _AutoShard.DATA, "file": _AutoShard.FILE, "off": _AutoShard.OFF}
_FEW_FILES = re.compile(  # message of TensorFlow
    r"only has (\d+) file\(s\), which is not enough for the required (\d+) shards"
)
_ALL = (
    "Let input_fn shard them by input_context.num_input_pipelines and input_pipeline_id; or, if "
    "each rank is to read all that it returns, give the HostOffloadStrategy auto_shard='off' "
    "(python -m estimator_ext --auto-shard off)"
)
_SAME_ORDER = (
    "Give its shuffles, generators and random numbers seeds that are the same on all ranks; or "
    "let each rank read its files (auto_shard='file'), or everything in its own order ('off')"
)


def check_policy(policy: str | None) -> None:
    """Raises ConfigError for an invalid value of auto_shard."""
    if policy is not None and not (isinstance(policy, str) and policy in POLICIES):
        policies = ", ".join(map(repr, POLICIES))
        raise hostopt.ConfigError(
            f"auto_shard is {shown(policy)}, wanted None or one of {policies}. Give one of them"
        )


def policy_of(dataset: tf.data.Dataset) -> Any:
    """Returns the `AutoShardPolicy` in the options of a dataset."""
    with options_in_graph():
        return dataset.options().experimental_distribute.auto_shard_policy


def with_policy(dataset: tf.data.Dataset, policy: str) -> tf.data.Dataset:
    """Returns a dataset that TensorFlow shards as the option auto_shard says."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = POLICIES[policy]
    return dataset.with_options(options)


@contextlib.contextmanager
def dividing(
    communicator: hostopt.Communicator,
    context: tf.distribute.InputContext,
    policy: str | None,
    config: tf.compat.v1.ConfigProto | None = None,
) -> Iterator[Callable[[Any], Any]]:
    """Shards the data of an input_fn that is called within the block.

    Yields a function that takes its result and returns the shard of this rank. The policy is
    "data" or "file"; "off" if each rank reads all data. None acts like "off" and warns.
    """
    if policy in (None, "off"):
        if policy is None and communicator.rank == 0:
            _log.warning(
                "input_fn has no argument input_context: each of the %d ranks reads the data that "
                "it returns. Shard them by input_context, or give the HostOffloadStrategy "
                "auto_shard='data'; auto_shard='off' silences this warning",
                communicator.size,
            )
        yield lambda data: data
        return
    check = OrderCheck(communicator.duplicate("the order of the data"), _SAME_ORDER)
    place = context.num_input_pipelines, context.input_pipeline_id
    shards = _Shards(*place, str(policy), check, config)
    with _in_one_order(communicator), _sharded_iterators(shards) as made:

        def divide(data: Any) -> Any:
            if isinstance(data, tf.data.Dataset):
                return shards.of_dataset(data)
            if not made:
                raise UnsupportedError(
                    "input_fn has no argument input_context, and what it returns cannot be "
                    f"divided among {communicator.size} ranks: no dataset, and no tensors of an "
                    f"iterator or a queue that it made. {_ALL}"
                )
            return data

        yield divide


@dataclass(frozen=True)
class _Shards:
    size: int
    rank: int
    policy: str
    check: OrderCheck
    config: tf.compat.v1.ConfigProto | None

    def of_dataset(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the shard of a dataset, as TensorFlow's own strategies make it."""
        current = policy_of(data)
        if current == _AutoShard.OFF:
            return data
        if any(op.type == "ShardDataset" for op in walk([variant_tensor(data).op])):
            raise UnsupportedError(
                "input_fn has no argument input_context, and shards its dataset by itself: "
                f"divided once more, the ranks would read a part of a part. {_ALL}"
            )
        if current == _AutoShard.AUTO:
            current, data = POLICIES[self.policy], with_policy(data, self.policy)
        if current != _AutoShard.FILE:
            data, _ = self.check.in_one_order(data, self.config)
        with tf.device(HOST_DEVICE), options_in_graph():
            data = AutoShardDataset(data, self.size, self.rank)
        if self.rank == 0:
            _log.info(
                "TensorFlow divides the data among %d ranks (auto_shard=%r)",
                self.size,
                self.policy,
            )
        return data

    def of_rows(self, rows: Any) -> Any:
        """Returns the rows that a rank reads, as many as the others, of the same kind.

        They are an array, an OrderedDict of arrays, or a DataFrame.
        """
        size, rank = self.size, self.rank
        is_dict = isinstance(rows, dict)
        count = len(next(iter(rows.values()))) if is_dict else len(rows)
        if count < size:
            raise hostopt.ConfigError(
                f"input_fn reads {count} rows of data, wanted at least one for each of the {size} "
                "ranks. Give it more data, or use fewer ranks"
            )
        has_columns = is_dict or hasattr(rows, "iloc")
        self.check.check_rows([column for _, column in rows.items()] if has_columns else [rows])
        if rank == 0:
            _log.info("each of %d ranks reads every %d-th of %d rows", size, size, count)
            if count % size:
                _log.warning(
                    "the last %d of %d rows are left out, so that all %d ranks read as many",
                    count % size,
                    count,
                    size,
                )
        shard = slice(rank, count - count % size, size)
        if is_dict:
            return type(rows)((name, array[shard]) for name, array in rows.items())
        return getattr(rows, "iloc", rows)[shard]


@contextlib.contextmanager
def few_files_refused() -> Iterator[None]:
    """Scope that raises TensorFlow's error for fewer files than ranks as `ConfigError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _FEW_FILES.search(str(error))
        if found is None:
            raise
        raise hostopt.ConfigError(
            f"the number of files is {found[1]}, wanted at least one for each of the {found[2]} "
            "ranks, as auto_shard is 'file'. Use 'data' (python -m estimator_ext --auto-shard "
            "data), or more files"
        ) from error


class CommonSeed:
    """The seed that TensorFlow uses eagerly, outside of steps, if the program sets none.

    All ranks share it, so that they shuffle their data alike. Within steps each rank draws other
    random numbers, as for a dropout.
    """

    def __init__(self, cluster: hostopt.Cluster) -> None:
        self._seed: int | None = None
        is_one_of_many = cluster.size > 1 and cluster.rank is not None
        if is_one_of_many and tf.executing_eagerly() and current_seed() is None:
            self._set(zlib.crc32(repr(cluster.ring).encode()))

    def renew(self, seed: int) -> None:
        """Gives the next dataset another order, unless the program has set a seed of its own."""
        if self._is_current:
            self._set(seed)

    def hidden(self) -> contextlib.AbstractContextManager[None]:
        """Returns the scope of a step."""
        return seed_hidden() if self._is_current else contextlib.nullcontext()

    @property
    def _is_current(self) -> bool:
        return self._seed is not None and current_seed() == self._seed

    def _set(self, seed: int) -> None:
        self._seed = seed
        set_eager_seed(SeedOfRanks(seed))


@contextlib.contextmanager
def _in_one_order(communicator: hostopt.Communicator) -> Iterator[None]:
    """Gives all ranks the same random seed, so that shards of a shuffled dataset are disjoint."""
    graph = tf.compat.v1.get_default_graph()
    seed = graph.seed
    drawn = np.array(secrets.randbits(31) if seed is None else seed)
    common = int(communicator.broadcast(drawn, name="the seed of the data's order"))
    graph.seed = SeedOfRanks(common) if seed is None else common
    try:
        yield
    finally:
        graph.seed = seed


@contextlib.contextmanager
def _sharded_iterators(shards: _Shards) -> Iterator[list[Any]]:
    """Makes iterators and queues that are created within the block read the shard of this rank.

    The policy "data" also shards queues of rows of arrays or of a DataFrame, as
    `tf.compat.v1.estimator.inputs` makes them: each rank reads every N-th row. Each dataset or
    array that is sharded is added to the list.
    """
    made: list[Any] = []
    enqueue = _tf_estimator.feeding._enqueue_data
    kind = DatasetV1
    names = ("_make_one_shot_iterator", "_make_initializable_iterator")
    stock = {name: getattr(kind, name) for name in names}

    def make_by(name: str) -> Callable[..., Any]:
        def make(dataset: Any, *arguments: Any, **options: Any) -> Any:
            shard = DatasetV1Adapter(shards.of_dataset(dataset))
            made.append(shard)
            return stock[name](shard, *arguments, **options)

        return make

    def enqueue_shard(rows: Any, *arguments: Any, **options: Any) -> Any:
        if shards.policy == "data" and not isinstance(rows, types.FunctionType):
            rows = shards.of_rows(rows)
            made.append(rows)
        return enqueue(rows, *arguments, **options)

    try:
        _tf_estimator.feeding._enqueue_data = enqueue_shard
        for name in names:
            setattr(kind, name, make_by(name))
        yield made
    finally:
        _tf_estimator.feeding._enqueue_data = enqueue
        for name, method in stock.items():
            setattr(kind, name, method)
