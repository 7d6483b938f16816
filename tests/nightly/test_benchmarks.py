"""Computations of the benchmarks and their subprocesses; no times are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import common, network, page, training, workers
from benchmarks.embedding import models
from benchmarks.overhead import rank as overhead_rank


def load(name: str) -> Any:
    return page._load(ROOT / "benchmarks" / name / "main.py")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


# --- programs ---------------------------------------------------------------------------------


def test_a_program_returns_its_results() -> None:
    text = common.run(
        python("""
            from benchmarks import common
            print("[worker:0] ", end="")
            common.report(steps_per_s=2.5)
        """),
        60.0,
    )
    assert common.results_in(text, 1) == [{"steps_per_s": 2.5}]
    with pytest.raises(common.BenchmarkError, match="wanted 2 results, got 1"):
        common.results_in(text, 2)


def test_results_may_share_a_line_but_may_not_be_interleaved() -> None:
    assert common.results_in('x RESULT {"a": 1} ENDRESULT {"a": 2} END\n', 2) == [
        {"a": 1},
        {"a": 2},
    ]
    with pytest.raises(common.BenchmarkError, match="garbled"):
        common.results_in('RESULT {"a": RESULT {"a": 1} END', 1)


def test_a_failure_shows_the_last_output() -> None:
    with pytest.raises(common.BenchmarkError, match=r"exit code 3\n.*no such thing"):
        common.run(python("import sys; print('no such thing', file=sys.stderr); sys.exit(3)"), 60)


def test_a_program_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
        import pathlib, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path({str(pid)!r}).write_text(str(child.pid))
        child.wait()
    """
    with pytest.raises(common.BenchmarkError, match="took longer than 2 s"):
        common.run(python(code), 2.0)
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(int(pid.read_text())):
        if psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE:
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_failed_rank_is_named_and_not_the_ranks_that_were_killed() -> None:
    sleeper = python("import time; time.sleep(600)")
    with pytest.raises(common.BenchmarkError, match="exit code 7"):
        common.run_together([(sleeper, {}), (python("raise SystemExit(7)"), {})], 60.0)


def test_rounds_are_interleaved_and_a_failure_loses_one_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def good() -> int:
        calls.append("good")
        return len(calls)

    def bad() -> int:
        calls.append("bad")
        if len(calls) < 3:
            raise common.BenchmarkError("too weak")
        return len(calls)

    def never() -> int:
        raise common.BenchmarkError("not today")

    result = common.in_rounds({"good": good, "bad": bad, "never": never}, 2)
    assert calls == ["good", "bad"] * 2
    assert result == {"good": [1, 3], "bad": [4]}
    assert "round 1, bad FAILED: too weak" in capsys.readouterr().err


def test_values_of_a_round_are_stored_separately(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def bad() -> int:
        calls.append("bad")
        if len(calls) == 1:
            raise common.BenchmarkError("too weak")
        return len(calls)

    result = common.each_round({"good": lambda: 7, "bad": bad}, 3, "DeepFM:")
    assert result == [{"good": 7}, {"good": 7, "bad": 2}, {"good": 7, "bad": 3}]
    assert "DeepFM: round 1, bad FAILED: too weak" in capsys.readouterr().err


def test_workers_run_alone_or_as_pairs_with_an_address_for_rendezvous(tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(
        "import os, sys; from benchmarks import common;"
        "common.report(words=sys.argv[1:], threads=os.environ['TF_NUM_INTRAOP_THREADS'])"
    )
    one = workers.run("one", [program, "--steps", 3], 60.0)
    assert one == [{"words": ["--steps", "3"], "threads": "1"}]
    first, second = workers.run("two", [program], 60.0)
    assert first == second
    assert first["words"][0] == "--meeting"


def test_horovod_starts_with_the_requested_library(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    command, environ = common.horovod("gloo", python, "rank.py")
    assert command[:3] == [python, tmp_path / "bin/horovodrun", "--gloo"]
    assert environ == {"HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_GLOO_IFACE": "lo"}
    command, environ = common.horovod("mpi", python, "rank.py")
    assert (command[0], command[-1]) == ("mpirun", "rank.py")
    assert environ == {"HOROVOD_CPU_OPERATIONS": "MPI"}


def test_a_missing_peer_is_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "PEERS_DIR", tmp_path)
    common.peer_python.cache_clear()
    assert common.peer_python("gloo") is None
    assert f"Gloo (PyTorch) is skipped: no {tmp_path}/gloo/bin/python" in capsys.readouterr().err
    common.peer_python.cache_clear()


def test_namespaces_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda program: program)
    with pytest.raises(common.BenchmarkError, match="need root"), network.joined():
        pass


def test_the_installer_is_valid_bash() -> None:
    script = str(ROOT / "benchmarks/peers/install.sh")
    subprocess.run(["bash", "-n", script], check=True)


# --- arithmetic -------------------------------------------------------------------------------


def test_ratios_and_tables() -> None:
    assert common.ratio(3.0, 2.0) == "1.50"
    assert common.ratio(None, 2.0) == "-"
    assert common.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --: |\n| 1 | 2 |"


def test_speed_uses_all_steps_and_step_time_is_the_median() -> None:
    # steps of 1, 1 and 8 s: one of them was interrupted
    assert training.rates([2.0, 3.0, 4.0, 12.0]) == {"steps_per_s": 0.3, "step_ms": 1000.0}


def test_the_hook_reports_once_after_the_timed_steps(capsys: pytest.CaptureFixture[str]) -> None:
    tf = SimpleNamespace(estimator=SimpleNamespace(SessionRunHook=object))
    hook = training.make_hook(tf, warm_up_steps=2, steps=3)
    for _ in range(4):
        hook.after_run(None, None)
    assert capsys.readouterr().out == ""
    hook.after_run(None, None)
    hook.after_run(None, None)
    assert len(hook.times_s) == 4
    (result,) = common.results_in(capsys.readouterr().out, 1)
    assert result == training.rates(hook.times_s)


def test_two_systems_are_compared_round_by_round() -> None:
    rounds = [{"a": 3.0, "b": 1.0}, {"a": 5.0}, {"a": 9.0, "b": 2.0}, {"a": 8.0, "b": 8.0}]
    # the median of 2, 7 and 0 is not the difference of the medians
    assert common.in_each_round(rounds, float.__sub__, "a", "b") == 2.0
    assert common.in_each_round(rounds, float.__sub__, "a", "c") is None
    assert common.middle(rounds, "b") == 2.0
    assert common.middle(rounds, "c") is None
    assert (common.cell(1.25, 1), common.cell(None, 1)) == ("1.2", "-")


OVERHEAD = {
    "dense 24": [
        {"stock": 1.0, "stock-2": 1.5, "one-rank": 1.25, "host": 2.0},
        {"stock": 2.0, "stock-2": 2.5, "one-rank": 2.5, "host": 3.5},
        {"stock": 1.0, "stock-2": 1.0, "one-rank": 1.25},
    ],
    "sparse 24": [{"stock": 1.0, "host": 4.0}],
}


def test_overhead_is_relative_to_stock_in_the_same_round() -> None:
    text = load("overhead").tables({"step_ms": OVERHEAD})
    assert "| ms a step | dense 24 | sparse 24 |" in text
    assert "| stock, one process | 1.00 | 1.00 |" in text
    assert "| **hostopt, one rank, above stock, one process** | 0.25 | - |" in text
    assert "| **hostopt, one host, above stock, one process** | 1.25 | 3.00 |" in text
    assert "| **hostopt, one host, above stock, two processes** | 0.75 | - |" in text
    assert "gRPC" not in text


EMBEDDING = [
    {
        "deepfm one": 100.0,
        "deepfm none": 80.0,
        "deepfm host": 60.0,
        "deepfm grpc": 40.0,
        "deepfm horovod-gloo": 20.0,
        "deepfm horovod-mpi-dense": 30.0,
        "dense host": 10.0,
        "ema host": 9.0,
    },
    {
        "deepfm one": 200.0,
        "deepfm none": 160.0,
        "deepfm host": 140.0,
        "deepfm grpc": 80.0,
        "deepfm horovod-gloo": 50.0,
        "deepfm horovod-mpi-dense": 50.0,
        "dense host": 20.0,
    },
]


def test_ratios_compare_results_of_the_same_round() -> None:
    text = load("embedding").tables({"steps_per_s": EMBEDDING})
    models_in_it = "DeepFM | 100 variables | 100 variables, averaged |"
    assert f"| steps/s of each process | {models_in_it}" in text
    assert "| one process | 150.0 | - | - |" in text
    assert "| **hostopt, one host / one process** | 0.65 | - | - |" in text
    assert "| **hostopt, one host / two independent runs** | 0.81 | - | - |" in text
    assert "| **hostopt, one host: averaged / not averaged** | - | - | 0.90 |" in text
    # the fastest Horovod is the one with the best median: 40 of horovod-mpi-dense
    assert "| **hostopt, gRPC only / fastest Horovod** | 1.47 | - | - |" in text
    assert "| **hostopt, one host / fastest Horovod** | 2.40 | - | - |" in text
    assert "wide & deep" not in text


def test_horovod_runs_only_the_model_with_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = load("embedding")
    monkeypatch.setattr(embedding.common, "peer_python", Path)
    args = SimpleNamespace(models=["deepfm", "ema"], systems=["host", "horovod-mpi"])
    result = embedding.find_measures(args)
    assert list(result) == ["deepfm host", "deepfm horovod-mpi", "ema host"]
    monkeypatch.setattr(embedding.common, "peer_python", lambda name: None)
    assert list(embedding.find_measures(args)) == ["deepfm host", "ema host"]


def test_hidden_communication_is_the_part_that_does_not_lengthen_the_step() -> None:
    result = {
        "none": [{"step": 100.0}, {"step": 102.0}, {"step": 98.0}],
        "buckets": [{"step": 110.0, "ring": 50.0}],
        "one bucket": [{"step": 150.0, "ring": 50.0}],
    }
    rows = load("overlap").evaluate(result, 100.0)
    assert [row["variant"] for row in rows] == ["buckets", "one bucket"]
    assert [row["hidden"] for row in rows] == [pytest.approx(0.8), pytest.approx(0.0)]


def test_latency_and_bandwidth_are_fitted() -> None:
    model = load("model")
    seconds = {size: 2e-3 + 1e-9 * size for size in (1 << 16, 1 << 20, 1 << 26)}
    assert model.fit(seconds) == (pytest.approx(2e-3), pytest.approx(1e-9))


def test_the_modelled_ring_is_limited_by_the_slower_of_rank_and_link() -> None:
    model = load("model")
    byte_s = {"float32": 1e-9, "bf16": 1e-9}
    costs = model.Costs(round_s=1e-3, byte_s=byte_s, line_share=1.0, update_s_per_byte=0.0)
    # 4 ranks: 6 rounds of 1 ms, and 6/4 of 8e6 bytes at 8 Gbit/s (1e-9 s a byte), or 0.8 Gbit/s
    slow = model.ring_s(costs, 4, 8e6, 0.8, "float32")
    assert model.ring_s(costs, 4, 8e6, 8.0, "float32") == pytest.approx(0.006 + 0.012)
    assert model.ring_s(costs, 4, 8e6, 80.0, "float32") == pytest.approx(0.006 + 0.012)
    assert slow == pytest.approx(0.006 + 0.12)
    assert model.ring_s(costs, 4, 8e6, 0.8, "bf16") == pytest.approx(0.006 + 0.06)


def test_the_modelled_step_hides_all_but_the_last_bucket_if_possible() -> None:
    model = load("model")
    costs = model.Costs(0.0, {}, 1.0, update_s_per_byte=1e-9)
    work = model.Workload(4e6, 1e6, forward_s=0.01, backward_s=0.04)
    # four buckets: the ring keeps up with backward, then it does not
    assert model.step_s(costs, work, 0.005) == pytest.approx(0.01 + 0.04 + 0.005 + 0.001)
    assert model.step_s(costs, work, 0.02) == pytest.approx(0.01 + 0.01 + 0.08 + 0.001)


# --- models -----------------------------------------------------------------------------------


def test_few_ids_are_frequent_and_all_are_in_the_vocabulary() -> None:
    features, clicks = models.make_clicks(64, seed=0)
    assert features["ids"].shape == (models.BATCHES, 64, models.FIELDS)
    assert set(np.unique(clicks)) == {0.0, 1.0}
    for field, vocabulary in enumerate(models.VOCABULARIES):
        ids = features["ids"][..., field]
        counts = np.bincount(ids.ravel(), minlength=vocabulary)
        assert len(counts) == vocabulary
        assert counts[0] == counts.max() > ids.size / 20
        assert np.count_nonzero(counts) > 50
        assert all(len(np.unique(batch)) < len(batch) for batch in ids)


def test_ranks_have_different_data() -> None:
    for make in (models.make_clicks, models.make_census):
        (first, _), (again, _), (other, _) = make(8, 0), make(8, 0), make(8, 1)
        assert all(np.array_equal(first[name], again[name]) for name in first)
        assert not any(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("kind", "sparse"), [("dense", 0), ("sparse", 24)])
def test_tiny_models_have_the_expected_kinds_of_gradients(kind: str, sparse: int) -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        features, _ = overhead_rank.make_batches(kind, 24, seed=0)
        made = overhead_rank.PREDICT[kind](tf, tf.constant(features[0]), 24)
        assert gradient_kinds(tf, made) == (24, sparse)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_deepfm_has_a_sparse_gradient_of_each_table(optimizer: str) -> None:
    import tensorflow as tf

    import estimator_ext

    estimator_ext.install()
    features, clicks = models.make_clicks(4, seed=0)
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        model_fn = models.make_deepfm(tf, optimizer, lambda wrapped: wrapped)
        inputs = {name: tf.constant(values[0]) for name, values in features.items()}
        spec = model_fn(inputs, tf.constant(clicks[0]), "train")
        # tables, and kernels and biases of four layers
        assert gradient_kinds(tf, spec.loss) == (2 * models.FIELDS + 8, 2 * models.FIELDS)


def gradient_kinds(tf: Any, made: Any) -> tuple[int, int]:
    """Numbers of the gradients, and of the sparse ones among them."""
    result = tf.gradients(made, tf.compat.v1.trainable_variables())
    assert None not in result
    return len(result), sum(isinstance(gradient, tf.IndexedSlices) for gradient in result)


ALLREDUCE = {
    "machine": {
        "date": "2026-01-02T00:00:00+00:00",
        "cpu": "a processor",
        "cores": 2,
        "memory_gib": 4.0,
        "python": "3.11.7",
        "versions": {"numpy": "1.26.4"},
    },
    "gb_per_s": {
        "hostopt grpc+tcp": {"65536": 0.5, "1048576": 1.0},
        "tf": {"65536": 0.25, "1048576": 0.5},
    },
    "processor_s_per_gb": {
        "hostopt grpc+tcp": {"65536": 0.9, "1048576": 0.6},
        "hostopt grpc": {"65536": 1.8, "1048576": 1.5},
    },
    "peak_memory_in_gradients": {"without": [1.5, 1.6, 1.4], "hostopt grpc+tcp": [3.0]},
    "more_ranks": [
        {
            "ranks": 4,
            "system": system,
            "size_bytes": size_bytes,
            "seconds": [seconds, 0.009, 0.0001],
        }
        for system, seconds in (("hostopt grpc+tcp", 0.002), ("gloo", 0.003))
        for size_bytes in (1 << 16, 1 << 20)
    ],
}


def test_tables_are_generated_from_json() -> None:
    text = load("allreduce").tables(json.loads(json.dumps(ALLREDUCE)))
    assert "| hostopt grpc+tcp | 0.50 | 1.00 |" in text
    assert "| **hostopt grpc+tcp / TensorFlow RING** | 2.00 | 2.00 |" in text
    assert "| **hostopt grpc+tcp / hostopt grpc** | 0.50 | 0.40 |" in text
    assert "| hostopt grpc+tcp | 3.00 | 1.50 |" in text
    assert "| hostopt grpc+tcp | 4 | 2.00 | 2.00 |" in text
    assert "| **Gloo TCP / hostopt grpc+tcp** | 4 | 1.50 | 1.50 |" in text


def test_local_steps_are_compared_with_no_communication_of_the_same_round() -> None:
    def done(*rates: float) -> dict[str, dict[str, float]]:
        names = ("none", "every step", "diloco")
        return {n: {"steps_per_s": r, "sent_bytes": 100 * r} for n, r in zip(names, rates)}

    results = {
        "speeds": {"1000": [done(10, 5, 9), done(20, 5, 19)], "100": [done(10, 1, 8)]},
        "sent_bytes": {"every step": 44e6, "background bf16": 88e3},
        "every": 100,
        "long": 250,
    }
    text = load("slow_link").tables(results)
    assert "| steps/s of each worker | 1 Gbit/s | 0.1 Gbit/s | bytes sent in a step |" in text
    # the medians of 0.5 and 0.25, and of 0.9 and 0.95
    assert "| a reduction in every step | 5.00 (0.375) | 1.00 (0.100) | 500 |" in text
    assert "| DiLoCo, N = 100 | 14.00 (0.925) | 8.00 (0.800) | 900 |" in text
    assert "| DiLoCo in the background, bf16, N = 250 | 88,000 | 500.0 |" in text


def test_accuracies_are_medians_of_the_seeds() -> None:
    def seed(*accuracies: float) -> dict[str, dict[str, float]]:
        names = ("every step", "average")
        return {name: {"accuracy": each, "loss": 0.5} for name, each in zip(names, accuracies)}

    runs = {"digits": [seed(0.97, 0.96), seed(0.98, 0.975), seed(0.90, 0.99)]}
    text = load("local_quality").tables({"runs": runs})
    assert "| a reduction in every step | 97.00 | - | 90.00 to 98.00 | 0.5000 |" in text
    assert "| mean of the variables | 97.50 | +0.50 | 96.00 to 99.00 | 0.5000 |" in text
    assert "int8" not in text


def test_measured_times_are_compared_with_the_model() -> None:
    row: dict[str, Any] = {
        "ranks": 4,
        "size_bytes": 1 << 20,
        "seconds_by_round": [0.02, 0.03, 0.04],
        "modelled_s": 0.015,
    }
    text = load("scaling").tables({"rows": [row], "steps": [{**row, "alone_s": [0.01]}]})
    assert "| 4 | 1 MiB | 30.00 | 15.00 | 2.00 |" in text
    assert "| 4 | 10.00 | 30.00 | 15.00 | 2.00 |" in text


def test_tables_are_written_between_the_markers_of_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = tmp_path / "docs/benchmarks.md"
    for name in page.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name in [name for names in page.PAGES.values() for name in names]:
        folder = tmp_path / "benchmarks" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main.py").write_bytes((ROOT / "benchmarks" / name / "main.py").read_bytes())
    results = tmp_path / "benchmarks/allreduce/results.json"
    results.write_text(json.dumps(ALLREDUCE))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    page.main()
    once = written.read_text()
    page.main()
    assert written.read_text() == once
    section = once.partition("<!-- allreduce -->\n")[2].partition("<!-- end of allreduce -->")[0]
    assert "| hostopt grpc+tcp | 0.50 | 1.00 |" in section
    assert "*2026-01-02: a processor, 2 cores, 4 GiB; Python 3.11.7, numpy 1.26.4.*" in section
    other = (tmp_path / "benchmarks/model/README.md").read_text()
    assert "<!-- model -->\nNo results yet.\n<!-- end of model -->" in other


# --- progress ---------------------------------------------------------------------------------


def test_progress_shows_the_cost_of_each_way_of_watching() -> None:
    rounds = [{"nothing": 100.0, "shown": 98.0}, {"nothing": 50.0, "shown": 49.5}]
    text = load("progress").tables({"steps_per_s": {"64": [*rounds, {"status": 7.0}]}})
    assert text.splitlines()[2:] == [
        "| not watched | 75.0 |",
        "| line of progress, and metrics read once a second | 73.8 (1.5 %) |",
        "| `hostopt status` once a second | 7.0 |",
    ]


def test_progress_hides_the_file_from_ranks_that_are_not_watched() -> None:
    progress = load("progress")
    for system in progress.SYSTEMS:
        words = list(map(str, progress.command_of(system, 64, 10, "/m")))
        is_shown = system == "shown"
        assert ("--metrics-port" in words) == is_shown
        assert ("HOSTOPT_PROGRESS_FILE" in words) == (not is_shown)
