"""Reductions anywhere in a step: as in one process on whole batches, or refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from halves import Halves
from programs.step_reductions import CASES, Case

from estimator_ext.deferred_reductions import DeferredReductions
from hostopt.tensorflow.reductions import Reduction

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]

STEPS = 4
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    """Trains all selected cases in one pair of processes."""
    items = [item for item in request.session.items if item.module is request.module]
    asked = [item for item in items if hasattr(item, "callspec")]
    chosen = dict.fromkeys(item.callspec.params["case"].name for item in asked)
    return Halves(tmp_path_factory.mktemp("cases"), "step_reductions.py", [*chosen], STEPS)


def cases(refused: bool) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if bool(case.refused) == refused]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


@cases(refused=False)
def test_two_ranks_equal_one_process(trained: Halves, case: Case) -> None:
    assert trained.outcome(case.name, "alone") == {"steps": STEPS, "error": None}
    trained.check_ranks_equal(case.name)
    trained.check_equal(case.name, TOLERANCE)
    if case.has_losses:
        expected = losses(trained, 1, case.name)
        assert len(expected) == STEPS
        np.testing.assert_allclose(losses(trained, 2, case.name), expected, rtol=1e-6)


def losses(trained: Halves, size: int, name: str) -> list[float]:
    """Returns the summaries of the chief, step by step."""
    (path,) = trained.model_dir(size, name).glob("events.*")
    events = tf.compat.v1.train.summary_iterator(str(path))
    return [v.simple_value for e in events for v in e.summary.value if v.tag == "loss"]


@cases(refused=True)
def test_a_program_without_an_equivalent_is_refused(trained: Halves, case: Case) -> None:
    assert trained.outcome(case.name, "alone") == {"steps": STEPS, "error": None}
    for rank in (0, 1):
        outcome = trained.outcome(case.name, rank)
        assert outcome["steps"] == 0
        assert outcome["error"] is not None
        assert outcome["error"]["code"] == 78, outcome["error"]["text"]
        assert re.search(case.refused, outcome["error"]["message"])


def test_each_reduction_has_a_unique_name() -> None:
    """The program may number its tensors in the same way."""
    with tf.Graph().as_default() as graph:
        deferred = DeferredReductions(None, graph, None)
        values = [tf.constant(float(number)) for number in range(6)]
        for value, name in zip(values, ["w", "w#2", "w", "w", "w#2", "v"]):
            deferred.add(Reduction(value, name))
        names = [each.reduction.name for each in deferred._deferred]
    assert len({*names}) == 6
    assert names[:2] == ["w", "w#2"]
