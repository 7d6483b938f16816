"""Trainings inside Ray Train."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
from harness import PROGRAMS, QUIET, Process, python
from ranks import Ranks

TRAINING = """
    import os, sys
    import ray
    import hostopt.ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    program = sys.argv[1:]

    def train():
        import runpy, threading
        assert threading.current_thread() is not threading.main_thread()
        sys.path.insert(0, os.path.dirname(program[0]))
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    TensorflowTrainer(
        train,
        tensorflow_config=hostopt.ray.HostOffloadConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.environ["STORAGE"]),
    ).fit()
"""
# worker 1 fails at the first start of the workers
RING = """
    import os
    import numpy, ray
    import hostopt.ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def train():
        import hostopt
        storage = os.environ["STORAGE"]
        with hostopt.connect() as ring:
            total = ring.all_reduce(numpy.array([ring.rank + 1.0]))
            failed = os.path.join(storage, "failed")
            if ring.rank == 1 and not os.path.exists(failed):
                open(failed, "w").close()
                raise ZeroDivisionError("by the user")
            total = ring.all_reduce(total)[0]
            with open(os.path.join(storage, f"rank-{ring.rank}"), "w") as file:
                file.write(f"{total} {'HOSTOPT_TOKEN' in os.environ}")

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    DataParallelTrainer(
        train,
        backend_config=hostopt.ray.HostOffloadConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=os.environ["STORAGE"], failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
"""


def arguments(directory: Path) -> str:
    run = {
        "optimizers": ["adam"],
        "steps": 3,
        "checkpoint_steps": 1,
        "collective_timeout_s": 30.0,
        "model_dir": str(directory),
    }
    return json.dumps({"runs": [run]})


def output_of(directory: Path, code: str, *arguments: str) -> str:
    """Runs a program with Ray Train to its end, and returns its output."""
    process = Process(
        [*python(code), *arguments],
        env={**os.environ, **QUIET, "STORAGE": str(directory / "storage")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return str(output)


def test_a_training_of_two_workers_equals_one_of_two_ranks(tmp_path: Path, ranks: Ranks) -> None:
    import tensorflow as tf

    output_of(tmp_path, TRAINING, str(PROGRAMS / "train.py"), arguments(tmp_path / "fitted"))
    ranks.run("train.py", 2, arguments=[arguments(tmp_path / "alone")])
    result, expected = (
        tf.train.load_checkpoint(str(tmp_path / name / "adam")) for name in ("fitted", "alone")
    )
    names = expected.get_variable_to_shape_map()
    assert result.get_variable_to_shape_map() == names
    for name in names:
        np.testing.assert_array_equal(
            result.get_tensor(name), expected.get_tensor(name), err_msg=name
        )


def test_an_error_of_a_worker_ends_the_ring_and_a_new_one_starts(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    output = output_of(tmp_path, RING)
    assert "ZeroDivisionError: by the user" in output
    assert (tmp_path / "storage" / "failed").exists()
    for rank in range(2):
        assert (tmp_path / "storage" / f"rank-{rank}").read_text() == "6.0 True"
