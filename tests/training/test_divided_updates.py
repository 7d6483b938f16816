"""Ranks that divide the updates train as those that do not, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

from divided import ALL, check_same, compare, divided, run

READ = ["adam_slots_read", "rows_of_ftrl_slots_read"]


def test_checkpoints_are_those_of_undivided_updates(tmp_path: Path) -> None:
    compare(
        tmp_path,
        ["adam", "own_clipped", "two", "held", "reads", "slices", "slots", "thread", *READ],
    )


def test_over_the_network_each_rank_gets_its_part_of_the_gradients(tmp_path: Path) -> None:
    compare(tmp_path, ["adam", "own_adam", "slots", "rows_of_adagrad"], communication="grpc+tcp")


def test_by_default_large_updates_are_divided_on_one_host(tmp_path: Path) -> None:
    run(tmp_path / "whole", ["large"], 2, False, "2,4")
    output = run(tmp_path / "default", ["large", "adam", "one_gpu"], 2, None, "2,4")
    assert divided(output, "large") == [*ALL, "wide"]
    first, second = map(int, re.findall(r"MAPPED (\d+)", output.split("CASE adam")[0]))
    assert second < first + (17 << 20)  # the slots of the first training are gone
    check_same(tmp_path / "default" / "large", tmp_path / "whole" / "large")
    assert "divide the updates" not in output.split("CASE adam")[1]
    assert "divide the updates" not in run(tmp_path, ["large"], 2, None, "4", "grpc+tcp")


def test_without_free_memory_each_rank_makes_all_updates(tmp_path: Path) -> None:
    run(tmp_path, ["large"], 2, False, "4")
    output = run(tmp_path, ["no_memory"], 2, None, "4")
    assert "divide the updates" not in output
    assert "bytes of /dev/shm. Enlarge it" in output
    check_same(tmp_path / "no_memory", tmp_path / "large")
