"""Model.fit, evaluate and predict of Keras 2 on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from keras_ranks import ENVIRON, HAS_KERAS_3, assert_equal, results_of
from ranks import Ranks

import hostopt

Results = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("keras_training.py", tmp_path_factory.mktemp("keras"))


def test_two_ranks_equal_one_process(results: Results) -> None:
    one, two = results
    assert len(one) == 11
    for case, expected in one.items():
        for part in expected:
            for rank in two:
                assert_equal(rank[case][part], expected[part], f"{part} of {case}")


def test_files_of_rank_0_and_a_stop_by_all_ranks(results: Results) -> None:
    first, second = (rank["checkpoints"] for rank in results[1])
    assert first == second
    assert first["files"] == ["model.keras"]
    assert first["epochs"] == 2
    assert first["restored"]


def test_a_rank_without_rows_in_the_last_batch(results: Results) -> None:
    first, second = (rank["uneven rows"] for rank in results[1])
    assert_equal(first, second)
    assert all(abs(value) < 1e6 for value in first["history"]["loss"])  # not NaN


def test_different_numbers_of_batches_are_refused(results: Results) -> None:
    for rank in results[1]:
        assert "rank 0: 2, rank 1: 4" in rank["uneven batches"]


def test_loss_scaling_is_refused(results: Results) -> None:
    for rank in results[1]:
        assert "Loss scaling is not supported" in rank["loss scale"]


def test_compilation_by_xla_is_refused(results: Results) -> None:
    for rank in results[1]:
        assert "Set jit_compile=False" in rank["xla"]


def test_an_error_in_a_function_ends_the_program_with_its_own_code(ranks: Ranks) -> None:
    codes = [hostopt.errors.PeerLostError.exit_code, 1]
    chief, worker = ranks.run("keras_that_fails.py", 2, codes=codes, environ=ENVIRON)
    assert "Root cause: ValueError: in step 3" in chief.output
    assert "ValueError: in step 3" in worker.output


def test_keras_3_is_refused(ranks: Ranks) -> None:
    if not HAS_KERAS_3:
        pytest.skip("this environment has Keras 2")
    codes, environ = [hostopt.ConfigError.exit_code], {"TF_USE_LEGACY_KERAS": "0"}
    for rank in ranks.run("keras_3_in_scope.py", 2, codes=codes, environ=environ):
        assert "Use hostopt.keras.DistributedOptimizer" in rank.output


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("keras_rows.py", tmp_path_factory.mktemp("rows"))


def test_each_row_is_trained_once_in_an_epoch(rows: Results) -> None:
    one, two = rows
    for rank in two:
        for case in [*one, "seed"]:
            assert rank[case]["once"] == [[64, 64], [64, 64]], case
        for case in ("arrays", "tensors", "shuffle"):  # each epoch has another order
            assert rank[case]["orders"] == one[case]["orders"] == 4, case


def test_other_rows_of_a_rank_are_refused(rows: Results) -> None:
    for rank in rows[1]:
        assert "element 0 of Tensor is not that of rank 0" in rank["other rows"]
        assert "the dataset has" in rank["other seed"]


def test_ranks_drop_different_units(rows: Results) -> None:
    first, second = (rank["dropout"] for rank in rows[1])
    assert first != second


def test_generators_of_other_orders_are_refused(ranks: Ranks) -> None:
    codes = [hostopt.ConfigError.exit_code]
    started = ranks.run(
        "keras_rows.py", 2, codes=codes, environ=ENVIRON, arguments=["", "generator"]
    )
    for rank in started:
        assert "of from_generator() is not that of rank 0" in rank.output
