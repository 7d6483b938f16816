"""Timelines and step reports of Estimator trainings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from summaries import summaries

import estimator_ext
from hostopt.__main__ import main

estimator_ext.install()


NAMES = (
    "communication_ms",
    "exposed_communication_ms",
    "overlap_percent",
    "slowest_rank",
    "skew_ms",
    "slowest_link",
)


def settings(tmp_path: Path, **chosen: Any) -> list[str]:
    own = {"model_dir": str(tmp_path / "model"), "bucket_mb": 2**-12, "steps": 7}
    return [json.dumps({**own, "summary_steps": 3, **chosen})]


def scalars(model_dir: Path) -> dict[int, dict[str, float]]:
    """Returns the summaries about communication, by step."""
    result: dict[int, dict[str, float]] = {}
    for step, tag, value in summaries(model_dir):
        if tag.startswith("hostopt/"):
            result.setdefault(step, {})[tag.partition("/")[2]] = value
    return result


def events(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["traceEvents"])


@pytest.mark.parametrize(("spec", "way"), [("host_call", "grpc"), ("minimize", "auto")])
def test_a_training_of_two_ranks(tmp_path: Path, ranks: Ranks, spec: str, way: str) -> None:
    arguments = settings(tmp_path, spec=spec)
    timeline = str(tmp_path / "trace.json")
    environ = {"HOSTOPT_TIMELINE": timeline, "HOSTOPT_COMMUNICATION": way}
    for rank in ranks.run("train.py", 2, arguments=arguments, environ=environ):
        assert "Traceback" not in rank.output
    reported = scalars(tmp_path / "model" / "sgd")
    assert sorted(reported) == [3, 6]
    for values in reported.values():
        assert sorted(values) == sorted(NAMES)
        assert 0 <= values["exposed_communication_ms"] <= values["communication_ms"]
        assert 0 <= values["overlap_percent"] <= 100
        assert values["slowest_rank"] in (0, 1)
        assert values["slowest_link"] in (0, 1)
        assert values["skew_ms"] >= 0
    merged = tmp_path / "merged.json"
    files = [str(tmp_path / f"trace.rank{rank}.json") for rank in range(2)]
    assert main(["trace", "merge", *files, "-o", str(merged)]) == 0
    spans = [event for event in events(merged) if event["ph"] == "X"]
    for rank in range(2):
        count = Counter(span["cat"] for span in spans if span["pid"] == rank)
        launched = {s["args"]["bucket"] for s in spans if s["cat"] == "launch"}
        buckets = len(launched)
        assert buckets > 1
        assert count["copy"] == count["backward"] == count["apply"] == 7
        assert count["launch"] == count["wait"] == 7 * buckets
        if way == "grpc":
            assert count["ring send"] > 7 * buckets  # the loss and the first values, too
    assert {span["args"]["step"] for span in spans if span["cat"] == "apply"} == set(range(7))


def test_three_ranks_report_to_the_chief_without_a_timeline(tmp_path: Path, ranks: Ranks) -> None:
    # rank 0 decides how often
    task_arguments = {f"worker:{i}": [json.dumps({"summary_steps": None})] for i in (1, 2)}
    ranks.run("train.py", 3, arguments=settings(tmp_path), task_arguments=task_arguments)
    reported = scalars(tmp_path / "model" / "sgd")
    assert sorted(reported) == [3, 6]
    assert {values["slowest_rank"] for values in reported.values()} <= {0, 1, 2}
    assert not list(tmp_path.glob("**/*.rank*"))


def test_steps_are_counted_from_the_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    for steps in (4, 7):  # rank 1 has no files of the first run
        ranks.run("train.py", 2, arguments=settings(tmp_path, steps=steps))
    assert sorted(scalars(tmp_path / "model" / "sgd")) == [3, 6]


def test_no_report_is_written_by_default(tmp_path: Path, ranks: Ranks) -> None:
    ranks.run("train.py", 2, arguments=settings(tmp_path, summary_steps=None))
    assert scalars(tmp_path / "model" / "sgd") == {}


def test_one_rank_reports_nothing(tmp_path: Path, ranks: Ranks) -> None:
    timeline = str(tmp_path / "trace.json")
    ranks.run("train.py", 1, arguments=settings(tmp_path, timeline=timeline))
    assert scalars(tmp_path / "model" / "sgd") == {}
    assert {event["ph"] for event in events(tmp_path / "trace.rank0.json")} == {"M"}
