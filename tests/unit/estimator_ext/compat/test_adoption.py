"""The ranks of an unmodified program, whose TF_CONFIG may change while it runs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import jobs_of, task_of

from estimator_ext.compat import adoption
from estimator_ext.errors import UnsupportedError
from hostopt.launch.environment import tf_config_of

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]


def describe(size: int, rank: int) -> None:
    """Sets TF_CONFIG, as a program may do."""
    os.environ["TF_CONFIG"] = tf_config_of(jobs_of(ADDRESSES[:size]), task_of(rank))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    monkeypatch.setenv("TF_CONFIG", "")
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that files were written atomically for."""
    ranks: list[int] = []
    monkeypatch.setattr(adoption, "write_atomically", ranks.append)
    return ranks


def test_a_cluster_is_joined_when_the_program_names_it(writers: list[int]) -> None:
    ranks = adoption.Ranks("data")
    assert ranks.join() is None
    describe(2, 1)
    strategy = ranks.join()
    assert strategy is not None
    assert (strategy.cluster.rank, strategy.cluster.size) == (1, 2)
    assert ranks.join() is strategy
    assert writers == [1]


def test_a_cluster_is_not_left(writers: list[int]) -> None:
    ranks = adoption.Ranks("data")
    describe(2, 0)
    strategy = ranks.join()
    os.environ["TF_CONFIG"] = ""
    assert strategy is ranks.join() is not None
    assert writers == [0]


def test_the_same_ranks_may_have_other_addresses(writers: list[int]) -> None:
    ranks = adoption.Ranks("data")
    describe(2, 1)
    strategy = ranks.join()
    os.environ["TF_CONFIG"] = tf_config_of({"worker": ["host:8", "127.0.0.1:9"]}, ("worker", 1))
    assert ranks.join() is strategy


@pytest.mark.parametrize(("size", "rank"), [(3, 1), (2, 0), (1, 0)])
def test_other_ranks_are_refused(size: int, rank: int, writers: list[int]) -> None:
    ranks = adoption.Ranks("data")
    describe(2, 1)
    ranks.join()
    describe(size, rank)
    with pytest.raises(UnsupportedError, match=f"changed TF_CONFIG: .* of {size} ranks"):
        ranks.join()


def test_a_resolver_of_the_program_names_its_cluster(writers: list[int]) -> None:
    spec = tf.train.ClusterSpec(jobs_of(ADDRESSES[:2]))
    resolvers = tf.distribute.cluster_resolver
    resolver: Any = resolvers.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    ranks = adoption.Ranks("data")
    strategy = ranks.join(resolver)
    assert strategy is not None
    assert (strategy.cluster.rank, strategy.cluster.size) == (1, 2)
    assert ranks.join() is strategy


def test_generators_have_one_seed_on_all_ranks(writers: list[int]) -> None:
    numbers = []
    for rank in range(2):
        random.seed()
        np.random.seed()
        ranks = adoption.Ranks("data")
        describe(2, rank)
        ranks.join()
        numbers.append((random.random(), np.random.rand()))
    assert numbers[0] == numbers[1]


def test_a_seed_of_the_program_is_kept(writers: list[int]) -> None:
    ranks = adoption.Ranks("data")
    random.seed(3)
    np.random.seed(4)
    describe(2, 1)
    ranks.join()
    assert random.random() == random.Random(3).random()
    assert np.random.rand() == np.random.RandomState(4).rand()


def test_a_program_may_choose_another_generator_of_numpy(writers: list[int]) -> None:
    own = np.random.get_bit_generator()
    ranks = adoption.Ranks("data")
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        describe(2, 1)
        ranks.join()
        drawn = np.random.randint(1000, size=4).tolist()
    finally:
        np.random.set_bit_generator(own)
    # not seeded again, as the program has seeded it
    state = np.random.RandomState(np.random.PCG64(7))
    assert drawn == state.randint(1000, size=4).tolist()
    assert writers == [1]
