"""Compares half batches on two ranks with full batches in the stock Estimator."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import reserved_addresses
from ranks import Ranks

LIMIT_S = 480.0  # for all models
LIMITS = {"HOSTOPT_COLLECTIVE_TIMEOUT_S": "120", "HOSTOPT_RENDEZVOUS_TIMEOUT_S": "120"}

Variables = dict[str, np.ndarray]


class Halves:
    """Trains models of a program by name: in one process with the stock class, and on two ranks.

    Args:
      program: file below tests/programs that ends with `by_name.train_all`.
      without_v2: trains with `tf.compat.v1.disable_v2_behavior()`.
    """

    def __init__(
        self,
        directory: Path,
        program: str,
        names: Sequence[str],
        steps: int,
        without_v2: bool = False,
    ) -> None:
        self._directory = directory
        self._environ = {**LIMITS, **({"TEST_WITHOUT_V2": "1"} if without_v2 else {})}
        self._outputs: dict[int, dict[str, list[str]]] = {1: {}, 2: {}}  # by size and model
        for size in (1, 2):
            (directory / str(size)).mkdir()
        self._train(1, program, names, steps)
        for name in names:
            self._copy_first_checkpoint(name)
        self._train(2, program, names, steps)

    def _train(self, size: int, program: str, names: Sequence[str], steps: int) -> None:
        """Trains all of `names`; if a model hangs, new processes train the remaining ones."""
        left = list(names)
        while left and self._start(size, program, left, steps):
            hung = [
                name
                for name in left
                if not all(self._outcome_path(name, r, size).exists() for r in range(size))
            ]
            left = left[left.index(hung[0]) + 1 :] if hung else []

    def _start(self, size: int, program: str, names: Sequence[str], steps: int) -> bool:
        """Starts the processes and waits for them; returns True if one failed."""
        directory = self._directory / str(size)
        settings = {"directory": str(directory), "names": list(names), "steps": steps}
        with Ranks(directory) as ranks, reserved_addresses(size) as addresses:
            started = ranks.start(
                program,
                {"worker": addresses},
                arguments=[json.dumps(settings)],
                environ={**self._environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            codes = [rank.wait(LIMIT_S) for rank in started]
        outputs = [rank.output for rank in started]
        self._outputs[size].update((name, outputs) for name in names)
        return any(codes)

    def _copy_first_checkpoint(self, name: str) -> None:
        """Copies the first checkpoint of the stock Estimator to the ranks, if there is one."""
        source, target = (self._directory / size / "models" / name for size in ("1", "2"))
        result = sorted(source.glob("model.ckpt-0.*"))
        if result:
            target.mkdir(parents=True)
            for path in result:
                shutil.copy(path, target)
            (target / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')

    def _outcome_path(self, name: str, rank: int | str, size: int) -> Path:
        return self._directory / str(size) / f"{name}-{'alone' if size == 1 else rank}.json"

    def model_dir(self, size: int, name: str) -> Path:
        return self._directory / str(size) / "models" / name

    def outcome(self, name: str, rank: int | str) -> dict[str, Any]:
        """Returns steps and error of a rank, or of "alone"."""
        size = 1 if rank == "alone" else 2
        path = self._outcome_path(name, rank, size)
        if not path.exists():
            output = self._outputs[size][name][0 if rank == "alone" else int(rank)]
            raise AssertionError(f"{name} did not end on {rank}:\n{output[-4000:]}")
        return json.loads(path.read_text())

    def variables(self, name: str, rank: int | str) -> Variables:
        """Returns the final variables of a rank, or of "alone"; fails if the training failed."""
        error = self.outcome(name, rank)["error"]
        assert error is None, f"{name} on {rank}:\n{error['text']}"
        size = 1 if rank == "alone" else 2
        result = dict(np.load(self._directory / str(size) / f"{name}-{rank}.npz"))
        return {**result, "trainable": np.unique(result["trainable"])}

    def check_ranks_equal(self, name: str, per_rank: Sequence[str] = ()) -> None:
        """Checks that the ranks hold the same bits, except in variables of each rank."""
        first, second = (self.variables(name, rank) for rank in (0, 1))
        assert set(first) == set(second)
        for variable in set(first) - set(per_rank):
            np.testing.assert_array_equal(
                second[variable], first[variable], err_msg=f"{name}: {variable} of ranks 1 and 0"
            )

    def check_equal(self, name: str, tolerance: float, per_rank: Sequence[str] = ()) -> None:
        """Checks that the ranks hold the values of the stock Estimator with full batches.

        The tolerance is relative and absolute. Variables of each rank are not compared.
        """
        alone, result = self.variables(name, "alone"), self.variables(name, 0)
        assert set(alone) <= set(result)
        np.testing.assert_array_equal(result["trainable"], alone["trainable"])
        for variable in set(alone) - set(per_rank) - {"trainable"}:
            np.testing.assert_allclose(
                result[variable],
                alone[variable],
                rtol=tolerance,
                atol=tolerance,
                err_msg=f"{name}: {variable} of 2 ranks and of one process",
            )
