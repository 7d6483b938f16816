"""Data that the framework shards: each row is read by one of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import estimator_ext
import hostopt
from estimator_ext.pipelines.sharding import dividing, few_files_refused
from hostopt.collectives.communicator import Communicator
from hostopt.transport.inproc import InprocTransport

estimator_ext.install()

v1 = tf.compat.v1
ROWS = np.arange(12.0)


def dataset() -> Any:
    return v1.data.Dataset.from_tensor_slices(ROWS).batch(2)


def initialized() -> Any:
    iterator = v1.data.make_initializable_iterator(dataset())
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


INPUTS: dict[str, Callable[[], Any]] = {
    "dataset": dataset,
    "shuffled dataset": lambda: dataset().unbatch().shuffle(12).batch(2),
    "one-shot iterator": lambda: v1.data.make_one_shot_iterator(dataset()).get_next(),
    "initializable iterator": initialized,
    "queue": v1.estimator.inputs.numpy_input_fn(
        {"x": ROWS}, batch_size=2, num_epochs=1, shuffle=False
    ),
}


def rows_of(data: Any) -> list[float]:
    if isinstance(data, tf.data.Dataset):
        data = v1.data.make_one_shot_iterator(data).get_next()
    batch = data["x"] if isinstance(data, dict) else data
    rows: list[float] = []
    with v1.train.MonitoredSession() as session:
        while not session.should_stop():
            rows += session.run(batch).tolist()
    return rows


@pytest.mark.parametrize("kind", INPUTS)
def test_the_ranks_read_each_row_once(kind: str) -> None:
    communicator = Communicator(InprocTransport.connect(1)[0])
    ranks = []
    for rank in range(2):  # one after the other: a process is one rank, and patched while it reads
        with tf.Graph().as_default() as graph:
            graph.seed = 5  # which the ranks of a ring agree on
            context = tf.distribute.InputContext(2, rank)
            with dividing(communicator, context, "data") as divide:
                data = divide(INPUTS[kind]())
            ranks.append(rows_of(data))
    assert [len(rows) for rows in ranks] == [6, 6]
    assert sorted(ranks[0] + ranks[1]) == ROWS.tolist()


def test_fewer_files_than_ranks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "only"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"record")
    communicator = Communicator(InprocTransport.connect(1)[0])
    expected = pytest.raises(
        hostopt.ConfigError, match=r"files is 1, .* of the 2 ranks, .*\. Use "
    )
    with tf.Graph().as_default(), expected, few_files_refused():
        data = v1.data.Dataset.list_files(str(path)).interleave(tf.data.TFRecordDataset)
        with dividing(communicator, tf.distribute.InputContext(2, 0), "file") as divide:
            shard = divide(data)
        rows_of(shard)
