"""Merging and drawing of trace files."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structures import texts_like

from hostopt.__main__ import main
from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.telemetry import trace_files
from hostopt.telemetry.timeline import Timeline, Track

JOBS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}


def recorded(tmp_path: Path, rank: int, jobs: Any = JOBS) -> str:
    """Writes the trace of a rank whose clock is `rank` times 100 s ahead of that of rank 0."""
    job, index = ("chief", 0) if rank == 0 else ("worker", rank - 1)
    timeline = Timeline(str(tmp_path / "trace.json"), Cluster.from_dict(jobs, job, index))
    timeline.clock_offset_s = -100.0 * rank
    begin_s = 50.0 + 100.0 * rank
    timeline.span(
        Track.LAUNCH, f"launch {rank}", begin_s + rank / 4, begin_s + 1, step=6, bucket=0
    )
    timeline.span(Track.APPLY, f"apply {rank}", begin_s + 1.5, begin_s + 2, step=6)
    timeline.close()
    return str(timeline.path)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    output = tmp_path / "merged.json"
    paths = [recorded(tmp_path, rank) for rank in (1, 0)]
    assert main(["trace", "merge", *paths, "-o", str(output)]) == 0
    return output


def test_merged_trace_is_aligned(merged: Path) -> None:
    whole = json.loads(merged.read_text())
    assert whole["otherData"]["hostopt"] == {"ranks": [0, 1], "size": 2}
    events = whole["traceEvents"]
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("launch 0", 0, 0.0, 1e6),
        ("launch 1", 1, 0.25e6, 0.75e6),
        ("apply 0", 0, 1.5e6, 0.5e6),
        ("apply 1", 1, 1.5e6, 0.5e6),
    ]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 (chief:0)", "rank 1 (worker:0)"]


def test_traces_without_spans_can_be_merged(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "t.json"), Cluster.from_dict(JOBS, "chief", 0))
    timeline.close()
    output = tmp_path / "merged.json"
    assert main(["trace", "merge", str(timeline.path), "-o", str(output)]) == 0
    assert {e["ph"] for e in json.loads(output.read_text())["traceEvents"]} == {"M"}


@pytest.mark.parametrize("text", ["", "[1]", "[]", "{}", '{"otherData": {}}', "\ud800"])
def test_a_file_that_is_not_a_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(text.encode(errors="surrogatepass"))
    assert main(["trace", "merge", str(other), "-o", str(tmp_path / "m.json")]) == 78
    assert "other.json is not a trace of hostopt" in capfd.readouterr().err
    assert not (tmp_path / "m.json").exists()


def test_traces_that_cannot_be_merged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, output = recorded(tmp_path, 0), str(tmp_path / "m.json")
    larger = recorded(tmp_path / "x", 1, {**JOBS, "worker": ["127.0.0.1:2", "127.0.0.1:3"]})
    joined = str(tmp_path / "joined.json")
    assert main(["trace", "merge", first, "-o", joined]) == 0
    for files, message in {
        (first, first): "are both of rank 0",
        (first, larger): "of a ring of 2 ranks and .* of 3",
        (first, joined): "joined.json has the attributes .* expected the trace of one rank",
        (first, "absent.json"): "absent.json cannot be read",
    }.items():
        assert main(["trace", "merge", *files, "-o", output]) == 78
        assert re.search(message, capfd.readouterr().err)
    assert main(["trace", "merge", first, "-o", str(tmp_path)]) == 78
    assert "cannot be written" in capfd.readouterr().err
    assert not Path(output).exists()


# --- picture ----------------------------------------------------------------------------------


def test_a_picture_of_the_last_step(merged: Path) -> None:
    picture = merged.with_suffix(".svg")
    assert main(["trace", "draw", str(merged), "-o", str(picture)]) == 0
    assert "<svg" in picture.read_text()


def test_steps_that_cannot_be_drawn(merged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = merged.with_suffix(".png")
    assert main(["trace", "draw", str(merged), "--step", "5", "-o", str(picture)]) == 78
    assert "has no step 5" in capfd.readouterr().err
    assert main(["trace", "draw", str(merged), "-o", str(picture) + ".none"]) == 78
    assert "cannot be written" in capfd.readouterr().err
    assert not picture.exists()


def test_drawing_without_matplotlib_names_the_extra(
    merged: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["trace", "draw", str(merged), "-o", "picture.png"]) == 78
    assert "pip install 'hostopt[draw]'" in capfd.readouterr().err


NAMED = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "apply"}}
SPAN = {"name": "a", "ph": "X", "cat": "launch", "pid": 0, "tid": 1, "ts": 1.0, "dur": 2.5}
WHOLE = {
    "otherData": {"hostopt": {"rank": 0, "size": 2, "clock_offset_us": 1.5}},
    "traceEvents": [
        NAMED,
        {**SPAN, "args": {"step": 1, "bucket": 0}},
        {**SPAN, "cat": "apply", "args": {"step": 1}},
    ],
}


@settings(suppress_health_check=list(HealthCheck))
@given(texts_like(WHOLE), st.integers(0, 9))
def test_a_file_of_any_structure_is_processed_or_refused(
    tmp_path: Path, content: bytes, number: int
) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    try:
        trace_files.merge([str(file)], str(tmp_path / "merged.json"))
    except ConfigError as error:
        assert re.search(r"[a-z)]\. [A-Z]", str(error))
        assert len(str(error)) < 1000
    else:
        json.loads((tmp_path / "merged.json").read_text())
    if number == 0:  # takes a while
        with contextlib.suppress(ConfigError):
            trace_files.draw(str(file), str(tmp_path / "picture.svg"))


@pytest.mark.parametrize("output", ["/", ".", "/no/such/directory/merged.json"])
def test_an_unwritable_output_path(
    tmp_path: Path, output: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "merge", recorded(tmp_path, 0), "-o", output]) == 78
    assert "cannot be written" in capfd.readouterr().err
