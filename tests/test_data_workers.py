"""Data workers: which elements the ranks get, and what is refused."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, QUIET, Process
from launcher import Launcher

import estimator_ext

estimator_ext.install()

pytestmark = [pytest.mark.tensorflow]

PROGRAM = str(PROGRAMS / "served_data.py")


class Served:
    """Trainings of the program, and the elements that their ranks have seen.

    Args:
      directory: an empty directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launcher = Launcher(directory)

    def start(self, *arguments: str, environ: Any = None, **settings: Any) -> Process:
        chosen = json.dumps({"directory": str(self.directory), **settings})
        command = (*arguments, "--verbose", "--", sys.executable, PROGRAM, chosen)
        return self.launcher.run(*command, **QUIET, **(environ or {}))

    def run(self, *arguments: str, **settings: Any) -> str:
        """Returns the output of a training that succeeds."""
        process = self.start(*arguments, **settings)
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, out + err
        return out + err

    def batches(self, task: str) -> list[list[int]]:
        """The batches of a task, without those that it repeats while it waits for others."""
        lines = [
            json.loads(line)
            for path in sorted(self.directory.glob(f"{task}.*"))
            for line in path.read_text().splitlines()
        ]
        return [batch for batch, _ in itertools.groupby(lines)]

    def elements(self) -> list[int]:
        """The elements that all ranks have seen, in order."""
        tasks = ("chief-0", "worker-0")
        return sorted(x for task in tasks for batch in self.batches(task) for x in batch)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    for process in served.launcher.started:
        process.kill()
        process.communicate()


def test_each_element_goes_to_one_rank_once(served: Served) -> None:
    arguments = ("-np", "2", "--data-workers", "2", "--evaluators", "1")
    output = served.run(*arguments, count=102, evaluates=True, max_steps=1000)
    assert served.elements() == list(range(102))
    assert "2 data workers prepare the data (distributed_epoch)" in output
    assert "metrics {'loss': " in output  # the evaluator reads all data itself
    assert "'mean': 50.5" in output
    for task in ("data:0", "data:1", "chief:0", "worker:0"):
        assert f"{task} has ended" in output


def test_an_input_context_names_the_only_pipeline(served: Served) -> None:
    served.run("-np", "2", "--data-workers", "1", count=40, epochs=2, takes_context=True)
    assert served.elements() == sorted([*range(40)] * 2)
    assert {tuple(each) for each in served.batches("context")} == {(1, 0, 2)}
    batches = [*served.batches("chief-0"), *served.batches("worker-0")]
    assert {len(batch) for batch in batches} == {4}  # half of the global size
