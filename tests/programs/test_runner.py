"""`python -m estimator_ext PROGRAM`: programs for a single process train on two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import (
    PROGRAMS,
    ROOT,
    jobs_of,
    reserved_addresses,
    run_python,
    start_python,
    task_of,
)
from runner import PROGRAM, check_like_one_process, horovod_data, horovod_weights, run

from hostopt.launch.environment import tf_config_of

KINDS = [
    "custom",
    "canned",
    "canned, keras",
    "clips",
    "gradients",
    "gradients of a sum",
    "sum over the batch",
    "shuffled",
    "keras",
    "mirrored",
    "of version 1",
    "one device",
    "tpu",
]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_like_one_process(tmp_path: Path, kind: str) -> None:
    check_like_one_process(tmp_path, kind)


def test_each_rank_reads_all_data_without_auto_shard(tmp_path: Path) -> None:
    model_dirs = [str(tmp_path / name) for name in ("off", "one")]
    options = ["--batch-size", "8", "--kind", "custom"]
    run(2, "--auto-shard", "off", PROGRAM, *options, "--model-dir", model_dirs[0])
    run(1, PROGRAM, *options, "--model-dir", model_dirs[1])
    both = [tf.train.load_variable(each, "w") for each in model_dirs]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-5)


def test_an_estimator_that_trains_by_itself_trains_in_one_process(tmp_path: Path) -> None:
    options = ["--batch-size", "8", "--kind", "trains by itself", "--model-dir"]
    run(1, PROGRAM, *options, str(tmp_path / "1"))
    assert tf.train.load_variable(str(tmp_path / "1"), "global_step") == 6
    ran = run(2, PROGRAM, *options, str(tmp_path / "2"), code=78)
    assert "Traceback" not in ran.stderr
    assert (
        "TrainsByItself overrides the method `train`, which does not support ranks" in ran.stderr
    )


def test_a_module_with_its_arguments(tmp_path: Path) -> None:
    options = ["--batch-size", "8", "--kind", "custom", "--model-dir", str(tmp_path / "model")]
    run(1, "-m", "unedited", *options, cwd=PROGRAMS)
    assert tf.train.load_variable(str(tmp_path / "model"), "global_step") == 6


@pytest.mark.parametrize(
    ("kind", "use", "text"),
    [
        ("on a tpu", "", "use_tpu is True, but this TPUEstimator trains on CPU and GPU"),
        (
            "custom",
            "tf.contrib.nccl",
            "the program uses tf.contrib.nccl, which TensorFlow removed",
        ),
        (
            "custom",
            "tf.contrib.layers.no_such_layer",
            "the program uses tf.contrib.layers.no_such_layer, which TensorFlow removed",
        ),
        (
            "custom",
            "__import__('tensorflow.contrib.nccl')",
            "the program uses tf.contrib.nccl, which TensorFlow removed. Remove it: gradients are",
        ),
        (
            "custom",
            "tf.flags.FLAGS",
            "the program uses tf.flags, which only TensorFlow 1 has. Run it with",
        ),
        (
            "custom",
            "value_of_dimension()",
            "the program uses the attribute value of dimensions (",
        ),
        (
            "custom",
            "tf.distribute.experimental.ParameterServerStrategy()",
            "the program creates a ParameterServerStrategy, but there are no parameter servers.",
        ),
        (
            "custom",
            "tf.train.Optimizer",
            "the program uses tf.train.Optimizer, which only TensorFlow 1 has. Run it with",
        ),
        (
            "custom",
            "strategy_of_version_1()",
            "the program creates a strategy with num_gpus, as in TensorFlow 1.",
        ),
        (
            "custom",
            "contrib_in_a_dataset()",
            "the program uses tf.contrib.crf.decode, which TensorFlow removed",
        ),
    ],
)
def test_names_without_a_replacement_end_with_one_line(
    tmp_path: Path, kind: str, use: str, text: str
) -> None:
    options = ["--batch-size", "8", "--kind", kind, "--model-dir", str(tmp_path), "--use", use]
    ran = run(1, PROGRAM, *options, code=78)
    assert "Traceback" not in ran.stderr
    assert text in ran.stderr.splitlines()[-1]


def test_a_strategy_of_two_devices_is_refused_on_two_ranks(tmp_path: Path) -> None:
    devices = (
        "tf.config.set_logical_device_configuration(tf.config.list_physical_devices('CPU')[0]"
    )
    devices += ", [tf.config.LogicalDeviceConfiguration()] * 2)"
    options = [PROGRAM, "--batch-size", "8", "--kind", "two devices", "--use", devices]
    ran = run(2, *options, "--model-dir", str(tmp_path), code=78)
    text = "trains with MirroredStrategy on 2 devices of each process, in a cluster of 2 ranks"
    assert text in ran.stderr + ran.stdout
    assert "Traceback" not in ran.stderr + ran.stdout


@pytest.mark.parametrize("program", ["hvd_estimator.py", "hvd_tape.py", "sdp_tape.py"])
def test_programs_of_horovod_import_its_names(tmp_path: Path, program: str) -> None:
    weights = []
    for size in (1, 2):
        directory = horovod_data(tmp_path / str(size))
        run(size, "--hvd", str(PROGRAMS / program), str(directory))
        weights += horovod_weights(directory, size)
    alone, first, second = weights
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name
    assert set(alone) == set(first)


def test_a_child_that_calls_init_counts(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    path = {str(PROGRAMS / "hvd_tape.py")!r}
    child = multiprocessing.get_context("spawn").Process(target=runpy.run_path, args=[path])
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    )
    directory = horovod_data(tmp_path / "data")
    run(2, "--hvd", str(program), str(directory))
    assert (directory / "weights-1.npz").exists()


HOROVOD = [
    "horovod.keras",
    "horovod.tensorflow.compression",
    "horovod.tensorflow.keras.callbacks",
    "smdistributed.dataparallel.tensorflow",
]


def test_a_program_of_horovod_without_the_option_or_without_init_is_refused(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join(f"import {name}" for name in HOROVOD))
    ran = run(1, str(program), code=78)
    assert "imports horovod, which is not installed. Run it with" in ran.stderr
    ran = run(2, "--hvd", str(program), code=78)
    assert "the program never called hvd.init()" in ran.stdout + ran.stderr
    program.write_text("import horovod.torch")
    ran = run(1, "--hvd", str(program), code=78)
    assert "imports horovod.torch, which hostopt does not have" in ran.stderr
    ran = run(1, "--hvd", "--loss", "sum", str(program), code=2)
    assert "leave out --auto-shard and --loss" in ran.stderr


@pytest.mark.parametrize("size", [1, 2])
def test_a_program_configures_devices_first(tmp_path: Path, size: int) -> None:
    run(size, str(PROGRAMS / "configures_devices.py"), str(tmp_path))
    assert tf.train.load_variable(str(tmp_path), "global_step") == 3


def test_a_program_without_estimators_is_refused_on_two(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('ran')\nsys.exit(0)\n")
    run(1, str(program))
    ran = run(2, str(program), code=78)
    assert "the program created no estimator: each of 2 processes ran" in ran.stdout + ran.stderr


def test_sets_and_shuffles_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import random
import numpy as np
import tensorflow as tf
tf.estimator.Estimator(lambda features: None)
print("ORDER", list({str(n) for n in range(30)}), random.random(), np.random.rand())
"""
    )
    environ = {"TF_CONFIG": "", "PYTHONHASHSEED": "random"}
    outputs = []
    for task in ({"type": "chief", "index": 0}, {"type": "worker", "index": 0}):
        cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
        environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        ran = run(1, str(program), **environ)
        outputs.append([line for line in ran.stdout.splitlines() if "ORDER" in line])
    assert outputs[0] == outputs[1] != []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shards by itself", "input_fn has no argument input_context, and shards its dataset"),
        ("tensors of a constant", "what it returns cannot be divided among 2 ranks"),
    ],
)
def test_data_that_cannot_be_sharded_are_refused(tmp_path: Path, kind: str, text: str) -> None:
    options = [PROGRAM, "--batch-size", "8", "--kind", kind, "--model-dir", str(tmp_path)]
    ran = run(2, *options, code=78)
    assert text in ran.stderr + ran.stdout
    run(2, "--auto-shard", "off", *options)


@pytest.mark.parametrize("arguments", [[], ["--auto-shard", "data"], ["-m"]])
def test_a_missing_program_is_a_usage_error(arguments: list[str]) -> None:
    ran = run(1, *arguments, code=2)
    assert "no program to run: give a SCRIPT, or -m and a MODULE" in ran.stderr


def test_names_that_programs_import() -> None:
    script = """
import estimator_ext
estimator_ext.install(contrib=True)
from tensorflow.python.estimator.canned import head, optimizers
from tensorflow.python.estimator import model_fn
from tensorflow_estimator.python.estimator.canned import head as now
import tensorflow as tf
import tensorflow.contrib.tpu as contrib_tpu
from tensorflow.contrib import data, lookup, metrics, cluster_resolver
assert head is now
assert tf.compat.v2.compat.v1.estimator.Estimator is tf.compat.v1.estimator.Estimator
assert contrib_tpu.TPUEstimator is estimator_ext.tpu.TPUEstimator
assert contrib_tpu.CrossShardOptimizer is estimator_ext.tpu.CrossShardOptimizer
assert contrib_tpu.shard is tf.compat.v1.tpu.shard
assert data.map_and_batch is tf.compat.v1.data.experimental.map_and_batch
assert lookup.index_table_from_tensor and metrics
assert cluster_resolver.TPUClusterResolver
"""
    run_python("-c", script)


def test_a_program_that_does_not_exist_is_a_usage_error() -> None:
    ran = run(1, "nowhere.py", "--option", code=2)
    assert "'nowhere.py' does not exist: give the path of a program" in ran.stderr


# -- ways in which a program finds its cluster -----------------------------------------------


def variables_of_mpirun(rank: int, address: str) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {
        "PMIX_NAMESPACE": f"run-{address}",
        **{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()},
    }


def variables_of_srun(rank: int, address: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": address.rpartition(":")[2],
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_PROCID": str(rank),
    }


def variables_by_hand(rank: int, address: str) -> dict[str, str]:
    return {"HOSTOPT_RANK": str(rank), "HOSTOPT_SIZE": "2", "HOSTOPT_RENDEZVOUS": address}


def check_two_processes(directory: Path, *ranks: Any) -> None:
    """Checks that two processes with these options and variables train one model."""
    options = [PROGRAM, "--kind", "custom", "--model-dir"]
    run(1, *options, str(directory / "1"), "--batch-size", "16")
    options += [str(directory / "2"), "--batch-size", "8"]
    processes = [
        start_python("-m", "estimator_ext", *options, *more, **environ) for more, environ in ranks
    ]
    for process in processes:
        process.ended_with(0, 200)
    trained = [tf.train.load_variable(str(directory / each), "w") for each in "12"]
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variables", [variables_of_mpirun, variables_of_srun, variables_by_hand])
def test_a_launcher_without_hostopt_exec(tmp_path: Path, variables: Any) -> None:
    with reserved_addresses(1) as (address,):
        check_two_processes(tmp_path, *(([], variables(rank, address)) for rank in range(2)))


def set_tf_config(jobs: dict[str, list[str]], rank: int) -> str:
    """An expression with which a program describes its cluster itself."""
    job, index = task_of(rank)
    config = json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})
    return f"__import__('os').environ.update(TF_CONFIG={config!r})"


def test_programs_that_set_tf_config_themselves_train_together(tmp_path: Path) -> None:
    with reserved_addresses(2) as addresses:
        uses = [["--use", set_tf_config(jobs_of(addresses), rank)] for rank in range(2)]
        check_two_processes(tmp_path, *((use, {}) for use in uses))


def test_a_cluster_is_not_left_without_tf_config(tmp_path: Path) -> None:
    with reserved_addresses(2) as addresses:
        use = ["--use", "__import__('os').environ.pop('TF_CONFIG')"]
        jobs = jobs_of(addresses)
        check_two_processes(
            tmp_path,
            *((use, {"TF_CONFIG": tf_config_of(jobs, task_of(i))}) for i in range(2)),
        )


def test_a_tf_config_of_other_ranks_is_refused(tmp_path: Path) -> None:
    use = set_tf_config(jobs_of(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]), 0)
    options = ["--batch-size", "8", "--kind", "custom", "--model-dir", str(tmp_path), "--use", use]
    ran = run(2, PROGRAM, *options, code=78)
    assert "changed TF_CONFIG: it names chief:0 of 3 ranks" in ran.stderr + ran.stdout
    assert "Traceback" not in ran.stderr + ran.stdout


def test_a_cluster_with_workers_only(tmp_path: Path) -> None:
    with reserved_addresses(1) as addresses:
        environ = {"TF_CONFIG": tf_config_of({"worker": addresses}, ("worker", 0))}
        options = ["--batch-size", "16", "--kind", "custom", "--model-dir", str(tmp_path)]
        run(1, PROGRAM, *options, **environ)
    assert tf.train.load_variable(str(tmp_path), "global_step") == 6


def test_a_strategy_for_several_workers_is_replaced(tmp_path: Path) -> None:
    options = [PROGRAM, "--model-dir"]
    run(1, *options, str(tmp_path / "1"), "--kind", "custom", "--batch-size", "16")
    run(2, *options, str(tmp_path / "2"), "--kind", "multi worker", "--batch-size", "8")
    trained = [tf.train.load_variable(str(tmp_path / each), "w") for each in "12"]
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("trains alone", "TrainsAlone._train_model"),
        ("has its own loop", "HasItsOwnLoop._train_model"),
    ],
)
def test_a_training_of_each_rank_alone_is_refused(tmp_path: Path, kind: str, method: str) -> None:
    options = [PROGRAM, "--batch-size", "8", "--kind", kind, "--model-dir", str(tmp_path)]
    ran = run(2, *options, code=78)
    assert method in ran.stderr + ran.stdout
    assert "trains each of 2 ranks alone" in ran.stderr + ran.stdout
    assert not list(tmp_path.glob("model.ckpt*"))


# the second one is only in TensorFlow 1
@pytest.mark.parametrize("base", ["tf.estimator.SessionRunHook", "tf.train.Optimizer"])
def test_spawned_children_import_the_program(tmp_path: Path, base: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import multiprocessing
import tensorflow as tf

class OfTheProgram({base}):
    pass

def work(x):
    return x + 1

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print("POOL", pool.map(work, [1, 2]))
"""
    )
    ran = run(1, str(program), limit_s=60.0)
    assert ran.stdout.count("POOL [2, 3]") == 2


def seen_by_ranks(ran: Any) -> list[int]:
    """Returns the elements that the ranks of data_orders.py have trained with."""
    lines = [line for line in ran.stdout.splitlines() if "SEEN " in line]
    return [each for line in lines for each in json.loads(line.partition("SEEN ")[2])]


@pytest.mark.parametrize("kind", ["interleave", "no seed"])
def test_each_element_is_trained_once(tmp_path: Path, kind: str) -> None:
    ran = run(2, str(PROGRAMS / "data_orders.py"), kind, str(tmp_path))
    assert sorted(seen_by_ranks(ran)) == list(range(64))


def test_elements_that_are_chosen_at_random_are_those_of_one_process(tmp_path: Path) -> None:
    ran = run(2, str(PROGRAMS / "data_orders.py"), "filter", str(tmp_path))
    seen = seen_by_ranks(ran)
    assert len(seen) == 64
    assert max(seen.count(each) for each in seen) <= 4  # as often as the data have it


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        # two random orders may begin with the same elements
        ("generator of NumPy", r"element \d+ of TensorSlice is not that of rank 0"),
        ("generator of Python", r"element \d+ of TensorSlice is not that of rank 0"),
        ("from_generator", r"element \d+ of from_generator\(\) is not that of rank 0"),
        ("seed", "the dataset has"),
        ("global seed", "the dataset has"),
        ("iterator", r"element \d+ of TensorSlice is not that of rank 0"),
        ("queue", r"element \d+ of rows is not that of rank 0"),
    ],
)
def test_other_orders_of_the_ranks_are_refused(tmp_path: Path, kind: str, text: str) -> None:
    ran = run(2, str(PROGRAMS / "data_orders.py"), kind, str(tmp_path), code=78)
    output = ran.stdout + ran.stderr
    assert re.search(text, output)
    assert "SEEN" not in output


def test_a_spawned_child_trains_as_the_rank_that_starts_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import multiprocessing
import sys
import unedited

def train():
    estimator = unedited.make_estimator("custom", sys.argv[1], 8)
    estimator.train(lambda: unedited.make_input_fn(8), max_steps=unedited.STEPS)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    )
    paths = {"PYTHONPATH": f"{ROOT}:{PROGRAMS}"}
    run(2, str(program), str(tmp_path / "2"), **paths)
    options = ["--kind", "custom", "--batch-size", "16", "--model-dir", str(tmp_path / "1")]
    run(1, PROGRAM, *options)
    trained = [tf.train.load_variable(str(tmp_path / each), "w") for each in "12"]
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-5, atol=1e-7)
