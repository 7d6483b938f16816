"""Models with the traits of published programs: 2 ranks on half batches equal the stock class.

The reference is `tf.estimator.Estimator` in one process, on whole batches and without a strategy.
All trainings of a model begin with the checkpoint that it writes before its first step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import tensorflow as tf
from halves import Halves
from programs.foreign import MODELS

STEPS = 20
TOLERANCE = 1e-5
STOPPED = "early_stop"  # the only model that stops before its last step
TRAINED = [name for name in MODELS if name != STOPPED]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    """Trains all selected models in one pair of processes."""
    items = [item for item in request.session.items if item.module is request.module]
    asked = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    chosen = [name for name in MODELS if name in asked | {STOPPED}]
    directory = tmp_path_factory.mktemp("foreign")
    return Halves(directory, "foreign.py", chosen, STEPS)


@pytest.mark.parametrize("name", TRAINED)
def test_the_stock_estimator_trains_the_model(trained: Halves, name: str) -> None:
    """A failure of another test is therefore a failure of hostopt."""
    assert trained.variables(name, "alone")["global_step"] == STEPS


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_hold_the_same_bits(trained: Halves, name: str) -> None:
    trained.check_ranks_equal(name)


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_on_half_batches_equal_one_process(trained: Halves, name: str) -> None:
    trained.check_equal(name, TOLERANCE)


@pytest.mark.parametrize("name", TRAINED)
def test_training_moves_most_variables(trained: Halves, name: str) -> None:
    """Exceptions: a bias that softmax ignores, and weights of features not in the data."""
    after = trained.variables(name, "alone")
    before = tf.train.load_checkpoint(str(trained.model_dir(1, name) / "model.ckpt-0"))
    whole = defaultdict(list)  # checkpoints hold partitions as one variable
    for key in after["trainable"]:
        whole[key.rpartition("/part_")[0] or key].append(np.atleast_1d(after[key]))
    changes = [
        abs(np.concatenate(parts) - before.get_tensor(key)).max() for key, parts in whole.items()
    ]
    assert np.mean(np.array(changes) > 100 * TOLERANCE) > 0.7


def test_a_stock_hook_with_its_defaults_stops_all_ranks_after_the_same_step(
    trained: Halves,
) -> None:
    trained.check_ranks_equal(STOPPED)
    assert 1 <= trained.variables(STOPPED, 0)["global_step"] < STEPS


@pytest.mark.parametrize("name", ["ranking"])
def test_two_ranks_export_the_model(trained: Halves, name: str) -> None:
    for size in (1, 2):
        exports = trained.model_dir(size, name) / "export" / "latest"
        assert list(exports.glob("*/saved_model.pb"))
