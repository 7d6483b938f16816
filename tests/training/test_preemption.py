"""SIGTERM and SIGINT: all ranks stop after the same step, and one checkpoint is saved."""

from __future__ import annotations

from pathlib import Path

from harness import reserved_addresses
from ranks import Ranks
from signalled import LATE, saved_steps, start

import estimator_ext

estimator_ext.install()


# -- processes -----------------------------------------------------------------------------


def test_a_signal_to_one_rank_stops_all_with_one_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    fault = {"point": "before-reduce", "step": 3, "action": "terminate"}
    with reserved_addresses(2) as addresses:
        chief, signalled = start(ranks, tmp_path, addresses, fault, api="ours")
        for rank in (chief, signalled):
            assert rank.wait(100) == 143, rank.output
            assert "RESULT" not in rank.output  # nobody has evaluated
    assert (
        "got SIGTERM: training stops on all ranks after this session.run or the next"
        in signalled.output
    )
    assert "training ends on all ranks: rank 1 got a signal to end" in chief.output
    # the signal arrives in the fourth step, and the other rank learns of it in the fifth
    assert saved_steps(tmp_path) == [0, 5]
    assert chief.output.count("Saving checkpoints for 5") == 1
    assert not (tmp_path / "model" / "adam" / "hostopt-training-ended.json").exists()
    with reserved_addresses(2) as addresses:
        for rank in start(ranks, tmp_path, addresses, {**fault, "step": LATE}, api="ours"):
            assert rank.wait(100) == 0, rank.output
    assert saved_steps(tmp_path) == [0, 5, 20]
