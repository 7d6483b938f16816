"""The seed that ranks share counts for random operations without a seed of their own."""

from __future__ import annotations

import json

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import seed_hidden
from estimator_ext.pipelines.sharding import CommonSeed

CONFIG = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 1},
}


def shuffled(seed: int | None) -> list[int]:
    return [int(each) for each in tf.data.Dataset.range(100).shuffle(100, seed=seed)]


def test_shuffles_with_a_seed_have_the_order_of_one_process() -> None:
    cluster = hostopt.Cluster.from_tf_config({"TF_CONFIG": json.dumps(CONFIG)})
    orders = []
    with seed_hidden():
        alone = shuffled(3)
        for number in (5, 5, 6):
            tf.random.set_seed(None)
            seed = CommonSeed(cluster)
            seed.renew(number)
            orders.append(shuffled(None))
            assert shuffled(3) == alone
    assert orders[0] == orders[1] != orders[2]
