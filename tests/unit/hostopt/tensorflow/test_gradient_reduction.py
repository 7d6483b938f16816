"""GradientReduction over two ranks: called eagerly, and with compressors of the user."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import CollectiveMismatchError, ConfigError
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.gradient_reduction import GradientReduction


class InQuarters:
    """Sends numbers of quarters as integers."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tf.cast(tensor * 4, tf.int32), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tf.cast(tensor, context) / 4


class InHalves(Compression.fp16):
    """Extends a compressor of hostopt; called in each reduction."""

    calls = 0

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        InHalves.calls += 1
        return Compression.fp16.compress(tensor * 2)

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return Compression.fp16.decompress(tensor, context) / 2


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, InQuarters, InHalves])
@pytest.mark.parametrize("is_eager", [True, False])
def test_sums_over_the_ranks(spawn: Spawn, compression: Any, is_eager: bool) -> None:
    values = np.array([[0.25, -3.0], [7.5, 2.0]], np.float32)  # of each rank

    def work(communicator: Communicator) -> list[Any]:
        ring = ProcessRing(communicator)
        reduction = GradientReduction("g", ReduceOp.SUM, compression, ring=lambda: ring)
        own, variable = values[communicator.rank], tf.Variable([0.0, 0.0])

        def reduce() -> Any:
            return reduction.reduce([None, tf.constant(own)], [variable, variable])

        if is_eager:
            return [None if each is None else each.numpy() for each in reduce()]
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("v", [2], use_resource=True)
            nothing, total = reduce()
            return [nothing, session.run(total)]

    results = spawn(2, work)
    assert compression is not InHalves or InHalves.calls > 0
    for nothing, total in results:
        assert nothing is None
        np.testing.assert_array_equal(total, values.sum(0), strict=True)


@pytest.mark.parametrize("length", [2, 100_000])  # in an exchange, and in buckets
@pytest.mark.parametrize("steps", [0, 2])
def test_gradients_that_one_rank_refuses_fail_on_all(
    spawn_ring: Spawn, length: int, steps: int
) -> None:
    error = ConfigError("they are too salty. Leave the salt out")

    def work(communicator: Communicator) -> str:
        ring = ProcessRing(communicator)
        reduction = GradientReduction("g", ReduceOp.SUM, ring=lambda: ring)
        variable = tf.Variable(tf.zeros([length]))

        def step() -> Any:
            return reduction.reduce([tf.ones([length])], [variable])[0]

        for _ in range(steps):
            step()
        reduction.refuse(error)  # on all ranks: nobody waits
        assert np.all(step() == 2)
        if communicator.rank == 1:
            reduction.refuse(error)
        with pytest.raises(CollectiveMismatchError) as caught:
            ring.named.barrier("end") if communicator.rank else step()
        return str(caught.value)

    (text,) = {*spawn_ring(2, work)}
    for expected in ["rank 1", "has refused the call 'gradients of g", error.message]:
        assert expected in text
