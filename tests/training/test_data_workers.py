"""Data workers: which elements the ranks get, and what is refused."""

from __future__ import annotations

import sys

from harness import ROOT
from served import Served

import estimator_ext

sys.path.insert(0, str(ROOT))


estimator_ext.install()


def test_each_element_goes_to_one_rank_once(served: Served) -> None:
    arguments = ("-np", "2", "--data-workers", "2", "--evaluators", "1")
    proxy = {"http_proxy": "http://127.0.0.1:9"}  # nothing listens there
    output = served.run(*arguments, count=102, evaluates=True, max_steps=1000, environ=proxy)
    assert served.elements() == list(range(1, 103))
    assert "2 data workers prepare the data (distributed_epoch)" in output
    assert "metrics {'loss': " in output  # the evaluator reads all data itself
    assert "51.5" in output
    for task in ("chief:0", "worker:0"):
        assert f"{task} has ended" in output
    for task in ("data:0", "data:1"):
        assert f"the ranks have ended: {task}, " in output
