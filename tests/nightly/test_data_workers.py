"""Data workers: which elements the ranks get, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from harness import ROOT, run_python
from served import Served

import estimator_ext

sys.path.insert(0, str(ROOT))


estimator_ext.install()


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("2", {"config": {"accumulate_steps": 2}}),
        ("1", {"config": {"iterations_per_loop": 2}}),
        ("2", {"strategy": {"sync_every": 3}}),
    ],
)
def test_each_element_once_with_other_ways_of_training(
    served: Served, size: str, options: Any
) -> None:
    served.run("-np", size, "--data-workers", "1", count=102, **options)
    assert served.elements() == list(range(1, 103))


def test_an_input_context_names_the_only_pipeline(served: Served) -> None:
    served.run("-np", "2", "--data-workers", "1", count=40, epochs=2, takes_context=True)
    assert served.elements() == sorted([*range(1, 41)] * 2)
    assert {tuple(each) for each in served.batches("context")} == {(1, 0, 2)}
    batches = [*served.batches("chief-0"), *served.batches("worker-0")]
    assert {len(batch) for batch in batches} == {4}  # half of the global size


def test_a_program_that_trains_and_evaluates_in_all_tasks(served: Served) -> None:
    output = served.run("-np", "2", "--data-workers", "2", count=40, rounds=2)
    assert served.elements() == sorted([*range(1, 41)] * 2)
    assert output.count("mean 20.5") == 4
    assert "ConfigError" not in output
    for task in ("data:0", "data:1"):
        assert output.count(f"the ranks have ended: {task}, ") == 1


def test_a_resumed_training_reads_the_data_from_the_beginning(served: Served) -> None:
    arguments = ("-np", "1", "--data-workers", "1")
    first = served.run(*arguments, count=40, max_steps=3, config={"data_service": "dynamic"})
    assert "its data cannot be saved with the checkpoints, and are read from the begin" in first
    seen = served.elements()
    assert len(seen) == 12
    second = served.run(*arguments, count=40)
    assert "the data are read from the beginning: no position was saved" in second
    assert served.elements() == sorted([*seen, *range(1, 41)])


def test_ranks_read_their_own_data_if_the_service_is_off(served: Served) -> None:
    config = {"data_service": "off"}
    served.run("-np", "2", "--data-workers", "1", count=40, config=config)
    for task in ("chief-0", "worker-0"):
        assert served.elements([task]) == list(range(1, 41))


@pytest.mark.parametrize("kind", ["source", "nested"])
def test_a_part_of_the_data_for_each_rank_is_refused(served: Served, kind: str) -> None:
    output = served.run("-np", "2", "--data-workers", "1", code=65, by_rank=kind)
    assert "(data workers prepare the one of rank 0 for all ranks) differ between" in output
    assert not served.elements()


def test_sparse_data_may_not_end(served: Served) -> None:
    arguments = ("-np", "2", "--data-workers", "1")
    output = served.run(*arguments, code=78, count=40, is_sparse=True)
    assert "the dataset of input_fn may end, and has sparse or ragged elements" in output
    assert not served.elements()
    served.run(*arguments, count=40, is_sparse=True, epochs=0, max_steps=5)
    assert [len(served.batches(task)) for task in ("chief-0", "worker-0")] == [5, 5]


# -- confinement ---------------------------------------------------------------------------


CONFINES_AS_NOBODY = """
import os, socket
from hostopt.transport.server_sockets import confine

if os.geteuid() == 0:
    os.setuid(65534)
with socket.create_server(("127.0.0.1", 0)) as server:
    for _ in range(3):
        confine(server.getsockname()[1])
"""


def test_any_user_may_confine_a_server_again() -> None:
    run_python("-c", CONFINES_AS_NOBODY)
