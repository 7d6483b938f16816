"""Ranks that divide the updates train as those that do not, bit for bit."""

from __future__ import annotations

from pathlib import Path

from divided import compare


READ = ["adam_slots_read", "rows_of_ftrl_slots_read"]


def test_checkpoints_are_those_of_undivided_updates(tmp_path: Path) -> None:
    compare(
        tmp_path, ["two", "held", "reads", "slices", "slots", "thread", *READ]
    )


def test_over_the_network_each_rank_gets_its_part_of_the_gradients(tmp_path: Path) -> None:
    compare(tmp_path, ["adam", "slots"], communication="grpc+tcp")
