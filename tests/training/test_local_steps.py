"""Local steps: ranks that average their variables every few steps, as simulated in NumPy."""

from __future__ import annotations

from pathlib import Path

from local_training import Training, assert_close, simulate
from ranks import Ranks


def test_ranks_that_synchronise_every_few_steps(ranks: Ranks, tmp_path: Path) -> None:
    strategy = {"sync_every": 6}
    results = Training(ranks, tmp_path).run(
        2,
        averaged={"inner": "momentum", "strategy": strategy},
        diloco={"inner": "adam", "outer": "nesterov", "strategy": strategy},
    )
    assert_close(results["averaged"], simulate(2, 20, 6, "momentum", None))
    # the powers of Adam's betas are variables of float32, whose mean is rounded
    assert_close(results["diloco"], simulate(2, 20, 6, "adam", "nesterov"), 1e-6)
    assert results["diloco"][0]["global_step"] == 20
