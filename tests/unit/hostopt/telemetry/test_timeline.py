"""Timelines: rows, spans, and a file that is complete at any time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT
from rings import Spawn

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.errors import ConfigError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import InlineReducer, Reducer
from hostopt.gradients.step_stats import StepTimes
from hostopt.telemetry import timeline as timeline_module
from hostopt.telemetry.timeline import Timeline, Track, path_of_rank
from hostopt.transport.message import Tag

JOBS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
LANES = ["copy", "backward", "launch", "ring send", "ring receive", "wait", "apply"]


def timeline(tmp_path: Path, job: str = "chief") -> Timeline:
    return Timeline(str(tmp_path / "trace.json"), Cluster.from_dict(JOBS, job, 0))


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in read(path)["traceEvents"] if event["ph"] == "X"]


def rows(path: Path) -> dict[int, str]:
    """Returns the names of the rows from the top."""
    events = read(path)["traceEvents"]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"].startswith("thread_s")}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(order) == set(names)
    return {row: names[row] for row in sorted(names, key=lambda row: order[row])}


@pytest.mark.parametrize(
    ("path", "expected"),
    [("trace.json", "trace.rank3.json"), ("a.b/c", "a.b/c.rank3"), ("x.y.gz", "x.y.rank3.gz")],
)
def test_path_of_rank(path: str, expected: str) -> None:
    assert path_of_rank(path, 3) == Path(expected)


def test_trace_content(tmp_path: Path) -> None:
    recorder = timeline(tmp_path, "worker")
    recorder.clock_offset_s = -0.5
    recorder.span(Track.WAIT, "w", 2.0, 2.5, step=1, bucket=0)
    recorder.span(Track.LAUNCH, "l", 1.0, 1.000001, step=1, bucket=0, bytes=128)
    recorder.close()
    path = tmp_path / "trace.rank1.json"
    assert list(tmp_path.iterdir()) == [path]
    whole = read(path)
    assert whole["otherData"]["hostopt"] == {
        "rank": 1,
        "size": 2,
        "clock_offset_us": -500000.0,
        "dropped_spans": 0,
    }
    assert whole["traceEvents"][0] == {
        "ph": "M",
        "name": "process_name",
        "pid": 1,
        "tid": 0,
        "args": {"name": "rank 1 (worker:0)"},
    }
    assert list(rows(path).values()) == LANES
    assert spans(path) == [
        {
            "ph": "X",
            "name": "l",
            "cat": "launch",
            "pid": 1,
            "tid": 32,
            "ts": 1e6,
            "dur": 1.0,
            "args": {"step": 1, "bucket": 0, "bytes": 128},
        },
        {
            "ph": "X",
            "name": "w",
            "cat": "wait",
            "pid": 1,
            "tid": 80,
            "ts": 2e6,
            "dur": 5e5,
            "args": {"step": 1, "bucket": 0},
        },
    ]


def test_overlapping_spans_have_separate_rows(tmp_path: Path) -> None:
    recorder = timeline(tmp_path)
    for name, begin_s, end_s in [("a", 1, 4), ("b", 2, 3), ("c", 3, 5), ("d", 4, 6)]:
        recorder.span(Track.LAUNCH, name, begin_s, end_s)
    recorder.close()
    names = rows(recorder.path)
    result = {span["name"]: names[span["tid"]] for span in spans(recorder.path)}
    assert result == {"a": "launch", "b": "launch (2)", "c": "launch (2)", "d": "launch"}
    assert list(names.values()) == [*LANES[:3], "launch (2)", *LANES[3:]]


def test_many_overlapping_spans_stay_in_their_track(tmp_path: Path) -> None:
    recorder = timeline(tmp_path)
    for _ in range(20):
        recorder.span(Track.RING_SEND, "x", 1, 2)
    recorder.close()
    names = rows(recorder.path)
    result = Counter(names[span["tid"]] for span in spans(recorder.path))
    assert result == {"ring send": 1, **{f"ring send ({row})": 1 for row in range(2, 16)}} | {
        "ring send (16)": 5
    }


def test_messages_of_one_round_become_one_span(tmp_path: Path) -> None:
    recorder = timeline(tmp_path)
    for at, (round_, segment) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]):
        tag = Tag(5, step=3, bucket=2, round=round_, chunk=round_ + 1, segment=segment)
        recorder.message(Track.RING_SEND, tag, "x", at, at + 0.5, 10)
        other = tag._replace(channel=6)  # at the same time on another channel
        recorder.message(Track.RING_SEND, other, "y", at, at + 0.5, 1)
    recorder.close()
    result = [(s["name"], s["ts"], s["dur"], s["args"]["bytes"]) for s in spans(recorder.path)]
    assert sorted(result) == [
        ("x", 0.0, 1.5e6, 20),
        ("x", 2e6, 2.5e6, 30),
        ("y", 0.0, 1.5e6, 2),
        ("y", 2e6, 2.5e6, 3),
    ]
    args = spans(recorder.path)[0]["args"]
    assert {name: args[name] for name in ("step", "bucket", "round")} == {
        "step": 3,
        "bucket": 2,
        "round": 0,
    }


def test_only_the_newest_spans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MAX_SPANS", 3)
    recorder = timeline(tmp_path)
    for number in range(10):
        recorder.span(Track.WAIT, str(number), number, number + 1)
    recorder.close()
    assert [span["name"] for span in spans(recorder.path)] == ["7", "8", "9"]
    assert read(recorder.path)["otherData"]["hostopt"]["dropped_spans"] == 7


def test_no_span_is_lost_between_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "REWRITE_EVERY_S", 1e-3)
    recorder = timeline(tmp_path)
    threads = [
        threading.Thread(
            target=lambda lane=lane: [recorder.span(lane, "x", i, i + 1) for i in range(500)]
        )
        for lane in Track
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read(recorder.path)  # complete at any time
    for thread in threads:
        thread.join()
    recorder.close()
    recorder.close()
    assert Counter(span["cat"] for span in spans(recorder.path)) == dict.fromkeys(LANES, 500)
    assert list(tmp_path.iterdir()) == [recorder.path]


def test_an_unwritable_file_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/trace\.rank0\.json cannot be written"):
        timeline(tmp_path / "file")


def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = timeline(tmp_path)
    recorder.span(Track.WAIT, "x", 1, 2)
    recorder.write()
    before = recorder.path.read_text()
    recorder.span(Track.WAIT, "y", 1, 2, fact=object())  # no JSON
    with pytest.raises(TypeError):
        recorder.write()
    assert recorder.path.read_text() == before
    assert list(tmp_path.iterdir()) == [recorder.path]
    recorder.path.unlink()
    recorder.path.mkdir()  # now it cannot be replaced
    recorder._spans.clear()
    recorder.close()
    assert "is not up to date" in caplog.text


def test_spans_are_written_at_exit_without_close(tmp_path: Path) -> None:
    code = """
import sys
from hostopt.cluster.cluster import Cluster
from hostopt.telemetry.timeline import Track, Timeline
recorder = Timeline(sys.argv[1], Cluster.from_dict({"chief": ["127.0.0.1:1"]}, "chief", 0))
recorder.span(Track.APPLY, "last", 1.0, 2.0)
"""
    path = tmp_path / "new directory" / "trace.json"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=True)
    assert [span["name"] for span in spans(path_of_rank(str(path), 0))] == ["last"]


def test_a_killed_program_leaves_a_complete_file(tmp_path: Path) -> None:
    code = """
import itertools, sys
from hostopt.cluster.cluster import Cluster
from hostopt.telemetry import timeline
from hostopt.telemetry.timeline import Track, Timeline
timeline.REWRITE_EVERY_S = 1e-3
cluster = Cluster.from_dict({"chief": ["127.0.0.1:1"]}, "chief", 0)
recorder = Timeline(sys.argv[1], cluster)
for number in itertools.count():
    recorder.span(Track.APPLY, "x", number, number + 1)
    if '"x"' in recorder.path.read_text():
        print("written", flush=True)
"""
    path = str(tmp_path / "trace.json")
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.kill()
    assert {span["name"] for span in spans(path_of_rank(path, 0))} == {"x"}


# --- records of a ring ------------------------------------------------------------------------

BUCKETS = plan_buckets(
    [TensorSpec(f"v{i}", (n,), np.dtype(np.float32)) for i, n in enumerate([24, 29])], 128
)


def two_steps(communicator: Communicator) -> Reducer:
    reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
    for _ in range(2):
        for number in range(len(BUCKETS)):
            arrays = [np.ones(spec.shape, np.float32) for spec in BUCKETS[number].specs]
            reducer.launch(number, arrays)
        for number in range(len(BUCKETS)):
            reducer.wait(number)
    reducer.close()
    return reducer


def test_a_reducer_records_each_bucket_of_each_step(spawn_ring: Spawn, tmp_path: Path) -> None:
    def work(communicator: Communicator) -> None:
        path = str(tmp_path / "trace.json")
        communicator.transport.timeline = Timeline(path, communicator.transport.cluster)
        two_steps(communicator)

    spawn_ring(3, work, segment_bytes=32)
    for rank in range(3):
        result = spans(path_of_rank(str(tmp_path / "trace.json"), rank))
        assert all(span["pid"] == rank and span["dur"] >= 0 for span in result)
        begins = [span["ts"] for span in result]
        assert begins == sorted(begins)
        of_buckets = Counter(
            (span["cat"], span["args"]["step"], span["args"]["bucket"]) for span in result
        )
        assert of_buckets == {
            (lane, step, bucket): count
            for lane, count in {"launch": 1, "ring send": 4, "ring receive": 4, "wait": 1}.items()
            for step in range(2)
            for bucket in range(2)
        }
        sent = [s for s in result if s["cat"] == "ring send" and s["args"]["round"] == 0]
        assert {s["args"]["bytes"] for s in sent} == {64}  # a third of 128 bytes and a mark of 64
        assert {s["name"] for s in result} == {
            "the gradient of 'v1' (bucket 1/2)",
            "the gradient of 'v0' (bucket 2/2)",
        }


def test_a_reducer_measures_times_without_a_timeline(spawn_inproc: Spawn) -> None:
    for reducer in spawn_inproc(2, two_steps):
        times = reducer.stats.last
        assert times.step == 1
        assert times.communication_ms > 0
        assert 0 <= times.exposed_ms <= times.communication_ms


def test_a_shared_memory_reducer_records_each_bucket(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")

    def work(communicator: Communicator) -> StepTimes | None:
        communicator.transport.timeline = Timeline(path, communicator.transport.cluster)
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        for number, bucket in [*enumerate(BUCKETS)] * 2:
            reducer.reduce(number, [np.ones(spec.shape, np.float32) for spec in bucket.specs])
        return reducer.stats.last

    for rank, times in enumerate(Spawn("shm")(2, work)):
        assert times.step == 1
        assert times.total_wait_ms > times.communication_ms > 0  # of two steps, and of the last
        of_buckets = Counter(
            (span["cat"], span["args"]["step"], span["args"]["bucket"])
            for span in spans(path_of_rank(path, rank))
            if span["cat"] in ("launch", "wait")
        )
        assert of_buckets == {
            (lane, step, bucket): 1
            for lane in ("launch", "wait")
            for step in range(2)
            for bucket in range(2)
        }


RANK = """
import numpy as np, sys, hostopt
with hostopt.connect() as communicator:
    communicator.all_reduce(np.ones(10, np.float32), name="ten ones")
print("done")
"""


def test_connect_starts_the_timeline(processes: Any, tmp_path: Path) -> None:
    ring = processes(3)
    started = ring.start_all(RANK, HOSTOPT_TIMELINE=str(tmp_path / "t.json"))
    for process in started:
        process.expect("done")
        assert process.exit_code() == 0, process.stderr
    for rank in range(3):
        path = tmp_path / f"t.rank{rank}.json"
        assert {span["name"] for span in spans(path)} == {"ten ones"}
        # one machine, one clock
        assert abs(read(path)["otherData"]["hostopt"]["clock_offset_us"]) < 60e6
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_timeline_on_one_rank_only_is_refused(processes: Any, tmp_path: Path) -> None:
    ring = processes(2)
    recording = ring.start(0, RANK, HOSTOPT_TIMELINE=str(tmp_path / "t.json"))
    other = ring.start(1, RANK)
    for process in (recording, other):
        assert process.exit_code() == 78, process.stderr
        assert f"{ring.name(1)} has timeline False. " in process.stderr
