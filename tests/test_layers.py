"""Imports run one way, and the public names are these."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostopt

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("hostopt", "estimator_ext")
    for path in sorted((ROOT / package).rglob("*.py"))
}
# Each module imports only modules above it.
LADDER = [
    "hostopt.errors",
    "hostopt.versions",
    "hostopt.shapes",
    "hostopt.descriptors",
    "hostopt.error_report",
    "hostopt.flight_recorder",
    "hostopt.options",
    "hostopt.cluster",
    "hostopt.step_stats",
    "hostopt.timeline",
    "hostopt.transport",
    "hostopt.transport.event_loop",
    "hostopt.transport.signature",
    "hostopt.transport.mailbox",
    "hostopt.transport.mismatch",
    "hostopt.transport.stall",
    "hostopt.transport.base",
    "hostopt.transport.inproc",
    "hostopt.transport.limits",
    "hostopt.transport.notes",
    "hostopt.transport.frame",
    "hostopt.transport.addresses",
    "hostopt.transport.security",
    "hostopt.transport.meeting",
    "hostopt.transport.strangers",
    "hostopt.transport.grpc_import",
    "hostopt.transport.grpc_parts",
    "hostopt.transport.grpc_calls",
    "hostopt.transport.allocator",
    "hostopt.transport.forked",
    "hostopt.transport.grpc",
    "hostopt.compression",
    "hostopt.ring",
    "hostopt.finite",
    "hostopt.shared_file",
    "hostopt.lane",
    "hostopt.hosts",
    "hostopt.lock_file",
    "hostopt.hierarchy",
    "hostopt.communicator",
    "hostopt.nonfinite",
    "hostopt.posted_sum",
    "hostopt.clock",
    "hostopt.bucket",
    "hostopt.record",
    "hostopt.skew",
    "hostopt.reducer",
    "hostopt.shared_sums",
    "hostopt.inline_reducer",
    "hostopt.fused_exchange",
    "hostopt.output",
    "hostopt.connect",
    "hostopt",
    "hostopt.tensorflow.background",
    "hostopt.tensorflow.ops",
    "hostopt.tensorflow.buckets",
    "hostopt.tensorflow.reductions",
    "hostopt.tensorflow",
    "hostopt._supervisor",
    "hostopt.task_process",
    "hostopt.restarts",
    "hostopt.task_group",
    "hostopt.launch",
    "hostopt.trace_files",
    "hostopt.trace_picture",
    "hostopt.bench",
    "hostopt.doctor",
    "hostopt.doctor.checking",
    "hostopt.doctor.software",
    "hostopt.doctor.machine",
    "hostopt.doctor.network",
    "hostopt.doctor.meeting",
    "hostopt.doctor.examine",
    "hostopt.cli",
    "estimator_ext.errors",
    "estimator_ext._tf_estimator._coordinator",
    "estimator_ext._tf_estimator._loading",
    "estimator_ext._tf_estimator",
    "estimator_ext.strict_rules",
    "estimator_ext.input_kinds",
    "estimator_ext.predictions",
    "estimator_ext.preemption",
    "estimator_ext.sync_on_read",
    "estimator_ext.graph",
    "estimator_ext.sharding",
    "estimator_ext.operation_kinds",
    "estimator_ext.gradient_marks",
    "estimator_ext.fingerprint",
    "estimator_ext.cached_reads",
    "estimator_ext.accumulation",
    "estimator_ext.uneven_data",
    "estimator_ext.skipped_updates",
    "estimator_ext.unique_rows",
    "estimator_ext.conditional_reductions",
    "estimator_ext.deferred_reductions",
    "estimator_ext.strategy",
    "estimator_ext.early_stopping",
    "estimator_ext.gradients",
    "estimator_ext.loss_scale",
    "estimator_ext.global_step",
    "estimator_ext.unreduced_updates",
    "estimator_ext.session_guard",
    "estimator_ext.file_errors",
    "estimator_ext.input_state_file",
    "estimator_ext.input_state",
    "estimator_ext.model_dir_lock",
    "estimator_ext.checkpoints",
    "estimator_ext.signs_of_life",
    "estimator_ext.agreement",
    "estimator_ext.desync",
    "estimator_ext.hooks",
    "estimator_ext.run_config",
    "estimator_ext.spec",
    "estimator_ext.batch_size",
    "estimator_ext.loop_hooks",
    "estimator_ext.loop",
    "estimator_ext.step_report",
    "estimator_ext.host_call",
    "estimator_ext.evaluators",
    "estimator_ext.metric_sums",
    "estimator_ext.estimator",
    "estimator_ext.training",
    "estimator_ext.tpu",
    "estimator_ext.hparams",
    "estimator_ext.contrib",
    "estimator_ext._aliases",
    "estimator_ext.installing",
    "estimator_ext.adoption",
    "estimator_ext.whole_files",
    "estimator_ext",
    "estimator_ext.__main__",
]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that the code imports, wherever in it, but for the type checker only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module
        else:
            yield from imports(node)


def imports_of(name: str) -> set[str]:
    return set(imports(ast.parse(FILES[name].read_text())))


def starts_with(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_imports_are_found_wherever_they_are() -> None:
    code = """
import json, os.path
from hostopt import ring, Options
from hostopt.errors import ConfigError
if TYPE_CHECKING:
    import hostopt.cli
else:
    import hostopt.launch
def function():
    try:
        import grpc
    except ImportError:
        from estimator_ext import spec as other
"""
    assert set(imports(ast.parse(code))) == {
        "json",
        "os.path",
        "hostopt.ring",
        "hostopt",
        "hostopt.errors",
        "hostopt.launch",
        "grpc",
        "estimator_ext.spec",
    }


def test_the_ladder_names_every_module() -> None:
    assert sorted(FILES) == sorted(LADDER)


@pytest.mark.parametrize("name", LADDER)
def test_a_module_imports_only_what_stands_above_it(name: str) -> None:
    ours = {found for found in imports_of(name) if starts_with(found, "hostopt")}
    ours |= {found for found in imports_of(name) if starts_with(found, "estimator_ext")}
    below = {found for found in ours if LADDER.index(found) >= LADDER.index(name)}
    assert not below


@pytest.mark.parametrize("name", [name for name in LADDER if starts_with(name, "hostopt")])
def test_hostopt_knows_nothing_of_estimator_ext(name: str) -> None:
    assert not [found for found in imports_of(name) if starts_with(found, "estimator_ext")]


def test_tensorflow_has_one_door_into_hostopt() -> None:
    users = {
        name
        for name in FILES
        if starts_with(name, "hostopt")
        and any(starts_with(found, "tensorflow") for found in imports_of(name))
    }
    assert all(starts_with(name, "hostopt.tensorflow") for name in users)


def test_nothing_that_a_peer_sends_becomes_an_object_or_code() -> None:
    makers = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    for name in (name for name in FILES if starts_with(name, "hostopt")):
        assert not {found.partition(".")[0] for found in imports_of(name)} & set(makers), name
    for name in (name for name in FILES if starts_with(name, "hostopt.transport")):
        tree = ast.parse(FILES[name].read_text())
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not called & {"eval", "exec", "compile", "__import__", "np.load"}, name


def test_only_the_grpc_transport_imports_grpc() -> None:
    users = {name for name in FILES if any(starts_with(f, "grpc") for f in imports_of(name))}
    assert users == {"hostopt.transport.grpc_import"}


def estimator_names(tree: ast.AST) -> Iterator[str]:
    """Where code, not text, reaches for tensorflow_estimator or tf.estimator."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "estimator":
            if ast.unparse(node).startswith(("tf.", "tensorflow.")):
                yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id == "tensorflow_estimator":
            yield node.id
        elif isinstance(node, ast.Constant) and node.value == "tensorflow_estimator":
            yield node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                parts = f"{module}.{alias.name}".split(".") if module else alias.name.split(".")
                in_tensorflow = parts[0] == "tensorflow" and "estimator" in parts
                if parts[0] == "tensorflow_estimator" or in_tensorflow:
                    yield ".".join(parts)


@pytest.mark.parametrize(
    "code",
    [
        "tf.estimator.Estimator",
        "x = tf.compat.v1.estimator.RunConfig()",
        "import tensorflow_estimator as e",
        "importlib.import_module('tensorflow_estimator')",
        "from tensorflow_estimator.python.estimator import util",
        "from tensorflow import estimator",
        "from tensorflow.compat.v1.estimator import Estimator",
    ],
)
def test_the_estimator_is_found_in_code(code: str) -> None:
    assert list(estimator_names(ast.parse(f"'''tf.estimator'''\n{code}")))


def test_the_estimator_has_one_door() -> None:
    users = {name for name in FILES if list(estimator_names(ast.parse(FILES[name].read_text())))}
    assert users == {"estimator_ext._tf_estimator._loading"}


def test_importing_hostopt_loads_neither_tensorflow_nor_grpc() -> None:
    code = "import sys, hostopt, hostopt.cli; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    loaded = run.stdout.split()
    assert "hostopt.communicator" in loaded
    heavy = ("tensorflow", "tensorflow_estimator", "grpc", "estimator_ext")
    assert not [name for name in loaded if name.partition(".")[0] in heavy]


# --- public names -----------------------------------------------------------------------------


def test_public_names_of_hostopt() -> None:
    assert sorted(hostopt.__all__) == [
        "AuthError",
        "CheckpointError",
        "Cluster",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "Communicator",
        "ConfigError",
        "HostOptError",
        "NonFiniteGradientError",
        "Options",
        "PeerLostError",
        "ProtocolError",
        "ReduceOp",
        "RendezvousTimeoutError",
        "ResourceError",
        "RetryableError",
        "Task",
        "connect",
    ]
    assert all(hasattr(hostopt, name) for name in hostopt.__all__)


def declared(name: str) -> list[str]:
    """`__all__` of a module, which is not imported."""
    (found,) = [
        node.value
        for node in ast.parse(FILES[name].read_text()).body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        == "__all__"
    ]
    return list(ast.literal_eval(found))


def test_public_names_of_estimator_ext() -> None:
    assert sorted(declared("estimator_ext")) == [
        "BroadcastVariablesHook",
        "Estimator",
        "EstimatorSpec",
        "HostOffloadStrategy",
        "LossScaleOptimizer",
        "RunConfig",
        "adopt",
        "install",
        "reduce_gradients",
        "train_and_evaluate",
    ]


def test_public_names_of_the_graph_operations() -> None:
    assert sorted(declared("hostopt.tensorflow")) == [
        "all_reduce",
        "broadcast",
        "reduce_in_buckets",
    ]


def test_public_names_of_the_tpu_part() -> None:
    assert sorted(declared("estimator_ext.tpu")) == [
        "CrossShardOptimizer",
        "InputPipelineConfig",
        "RunConfig",
        "TPUConfig",
        "TPUEstimator",
        "TPUEstimatorSpec",
    ]


def test_every_other_module_is_internal() -> None:
    public = {"hostopt", "hostopt.tensorflow", "estimator_ext", "estimator_ext.tpu"}
    empty = ("hostopt.transport", "hostopt.doctor")
    named = {name for name in FILES if name not in empty and declared(name)}
    assert named == public
