"""hostopt.tensorflow in a single process: its arguments, refusals, objects and XLA boundaries."""

from __future__ import annotations

import collections
import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hostopt
import hostopt.tensorflow as hvd
from hostopt import process_ring
from hostopt.collectives.hosts import Hosts
from hostopt.tensorflow import variables

v1 = tf.compat.v1


CALLS: list[Callable[[], Any]] = [
    hvd.rank,
    hvd.size,
    hvd.local_rank,
    hvd.local_size,
    hvd.cross_rank,
    hvd.cross_size,
    hvd.is_homogeneous,
    hvd.rank_op,
    hvd.global_process_set.size,
    hvd.barrier,
    lambda: hvd.allreduce(tf.ones([1])),
    lambda: hvd.allgather(tf.ones([1])),
    lambda: hvd.broadcast(tf.ones([1]), 0),
    lambda: hvd.broadcast_object(1),
    lambda: hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)),
]


@pytest.mark.parametrize("call", CALLS)
def test_calls_before_init(call: Callable[[], Any]) -> None:
    with pytest.raises(hostopt.ConfigError, match=r"not initialized\. Call init\(\) first"):
        call()


def test_init_twice_and_shutdown(ring: None) -> None:
    hvd.init()
    assert hvd.is_initialized()
    with pytest.raises(hostopt.ConfigError, match="called twice"):
        hvd.init(only_once=True)
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init(only_once=True)


def test_a_function_of_a_ring_that_was_left(ring: None) -> None:
    function = tf.function(lambda: hvd.allreduce(tf.ones([1]), name="x"))
    assert function().numpy() == 1
    hvd.shutdown()
    hvd.init()
    with pytest.raises(tf.errors.OpError, match="traced before shutdown"):
        function()


def test_a_clone_of_an_optimizer_reduces_as_well(ring: None) -> None:
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.5))
    clone = type(optimizer).from_config(optimizer.get_config())
    variable = tf.Variable([1.0])
    clone.apply_gradients([(tf.ones([1]), variable)])
    assert variable.numpy() == 0.5
    with pytest.raises(hostopt.ConfigError, match="Wrap it once"):
        hvd.DistributedOptimizer(clone)


def test_tf_config_is_hidden_until_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}}')
    hvd.init()
    assert "TF_CONFIG" not in os.environ
    hvd.shutdown()
    assert os.environ["TF_CONFIG"] == '{"cluster": {}}'


def test_one_rank(ring: None) -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


def test_ranks_by_host(ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    current = process_ring.current()
    monkeypatch.setattr(current, "hosts", Hosts(((0, 2), (1, 3, 4))))
    assert not hvd.is_homogeneous()
    seen = []
    for rank in range(5):
        monkeypatch.setattr(current, "rank", rank)
        monkeypatch.setattr(current, "local_ranks", current.hosts.members(rank))
        seen.append((hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()))
    assert seen == [(0, 2, 0, 2), (0, 3, 1, 2), (1, 2, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_ranks_as_tensors(ring: None) -> None:
    operations = [hvd.rank_op, hvd.size_op, hvd.local_rank_op, hvd.local_size_op]
    expected = [0, 1, 0, 1, 1]
    for each, value in zip([*operations, hvd.process_set_included_op], expected):
        tensor = each(name="x")
        assert (tensor.dtype, tensor.shape, int(tensor)) == (tf.int32, (), value)
    with tf.Graph().as_default():
        assert hvd.size_op(0, "ranks").op.name == "ranks"


def test_libraries_that_are_not_used(ring: None) -> None:
    names = ["mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"]
    names += ["nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"]
    assert not any(getattr(hvd, name)() for name in names)
    assert hvd.is_homogeneous()


def test_the_process_set_of_all_ranks(ring: None) -> None:
    every = hvd.global_process_set
    assert (every.process_set_id, every.ranks, every.size(), every.rank()) == (0, [0], 1, 0)
    assert every.included() and isinstance(every, hvd.ProcessSet)
    hvd.init(process_sets=[])
    assert hvd.allreduce(tf.ones([1]), process_set=every).numpy() == 1
    assert hvd.broadcast_object("x", process_set=every) == "x"
    assert hvd.broadcast_object_fn(0, process_set=every)("x") == "x"


@pytest.mark.parametrize("package", ["hostopt.tensorflow", "hostopt.tensorflow.keras"])
def test_names_of_horovod_that_do_not_exist(package: str) -> None:
    module = importlib.import_module(package)
    assert module.Adasum is hvd.Adasum and repr(module.Adasum) == "Adasum"
    for name in ["elastic", "SyncBatchNormalization", "start_timeline", "stop_timeline"]:
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        assert f"module '{package}' has no attribute '{name}'" in str(caught.value)
        assert "not supported" in str(caught.value)
        assert not hasattr(module, name)
    assert getattr(module, "other", None) is None


def sgd() -> Any:
    return v1.train.GradientDescentOptimizer(1.0)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: hvd.init(comm=[0, 1]), "TF_CONFIG or the launcher describes"),
    (lambda: hvd.init(process_sets="dynamic"), "process sets are not supported"),
    (lambda: hvd.allreduce(tf.ones([1]), process_set=object()), "process sets are not supported"),
    (lambda: hvd.ProcessSet([0]), "process sets are not supported"),
    (
        lambda: hvd.grouped_allgather([tf.ones([1])], process_set=object()),
        "process sets are not supported",
    ),
    (lambda: hvd.add_process_set([0]), "process sets are not supported"),
    (lambda: hvd.remove_process_set(hvd.global_process_set), "process sets are not supported"),
    (lambda: hvd.size_op(1), "process sets are not supported"),
    (lambda: hvd.allreduce(tf.ones([1]), op=hvd.Adasum), "op is Adasum, which is not supported"),
    (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum), "op is Adasum"),
    (lambda: hvd.reducescatter(tf.ones([1]), "/gpu:0"), "device_dense is '/gpu:0'"),
    (lambda: hvd.allreduce(tf.ones([1]), device_dense="/gpu:0"), "device_dense is '/gpu:0'"),
    (lambda: hvd.allreduce(tf.ones([1]), device_sparse="/gpu:0"), "device_sparse is"),
    (lambda: hvd.allreduce(tf.ones([1]), 3), "average is 3, wanted True or False"),
    (lambda: hvd.allreduce(tf.ones([1]), average=True, op=hvd.Sum), "both given"),
    (lambda: hvd.allreduce(tf.ones([1]), op="adasum"), "op is 'adasum'"),
    (lambda: hvd.allreduce(tf.constant(["a"])), "cannot be reduced"),
    (
        lambda: hvd.allreduce(tf.constant([True]), op=hvd.Sum, prescale_factor=0.5),
        "bool is to be multiplied",
    ),
    (
        lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1], tf.int32), [0]), prescale_factor=0.5),
        "rows of dtype int32 are to be multiplied by 0.5",
    ),
    (
        lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), [0]), op=hvd.Max),
        "cannot be reduced with MAX",
    ),
    (lambda: hvd.allgather(tf.ones([])), "has a scalar"),
    (lambda: hvd.allgather(tf.constant(["a"])), "objects or strings"),
    (lambda: hvd.broadcast(tf.zeros([1], tf.qint8), 0), "has a tensor of dtype qint8"),
    (lambda: hvd.broadcast(tf.ones([1]), 1), "root_rank is 1, wanted a rank from 0 to 0"),
    (lambda: hvd.reducescatter(tf.ones([1]), op=hvd.Max), "Use SUM or AVERAGE"),
    (lambda: hvd.alltoall(tf.ones([2]), splits=[1]), "whose sum is 2"),
    (lambda: hvd.broadcast_global_variables(0), "is called eagerly"),
    (lambda: hvd.BroadcastGlobalVariablesHook(0, device="/gpu:0"), "device is '/gpu:0'"),
    (tf.function(hvd.join, autograph=False), "join() is called in a tf.function"),
    (lambda: hvd.broadcast_object(object()), "cannot send its object: it has a part of type"),
    (lambda: hvd.allgather_object(10**5000), "cannot be encoded"),
    (lambda: hvd.DistributedOptimizer(object()), "an object of type object"),
    (lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd())), "Wrap it once"),
    (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Max), "reduced with MAX"),
    (lambda: hvd.DistributedOptimizer(sgd(), num_groups=2), "Use bucket_cap_mb"),
    (lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0), "above 0"),
    (
        lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
        "needs op=AVERAGE",
    ),
    (lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=[]), "Use bucket_cap_mb"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused_in_words(ring: None, call: Callable[[], Any], text: str) -> None:
    with pytest.raises(hostopt.ConfigError) as caught:
        call()
    assert text in str(caught.value)
    assert caught.value.exit_code == 78
    assert hvd.allreduce(tf.ones([1])).numpy() == 1  # nothing is lost


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {"a": [1, 2.5, float("inf"), True, None, "ä", b"\0\xff"], 3: (1, (2, [])), (1, 2): {}},
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float32(1.5),
        np.str_("a"),
        np.bytes_(b"a"),
        collections.OrderedDict([("b", {1, (2, "x")}), ("a", frozenset({3}))]),
    ],
)
def test_objects_survive(obj: Any) -> None:
    result = variables.decode(variables.encode(obj))
    assert type(result) is type(obj)
    if isinstance(obj, np.ndarray):
        assert result.dtype == obj.dtype and np.array_equal(result, obj)
    else:
        assert result == obj


Point = collections.namedtuple("Point", "x y")
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "obj",
    [
        collections.defaultdict(int, a=1),
        Point(1, 2),
        np.ma.masked_array([1.0], [True]),
        np.array([object()]),
        CYCLE,
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_objects_that_would_change_on_their_way_are_refused(obj: Any) -> None:
    with pytest.raises(hostopt.ConfigError, match=r"\. (Convert it|Send a flatter one)"):
        variables.decode(variables.encode({"a": [obj]}))


class Halved(hvd.Compression.none):
    """A compressor of a program."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return tf.cast(tensor, tf.float64) / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tf.cast(tensor * 2, context)


def test_a_compressor_of_the_program(ring: None) -> None:
    result = hvd.allreduce(tf.constant([3.0]), compression=Halved)
    assert result.dtype == tf.float32 and result.numpy() == [3.0]


@pytest.mark.parametrize("kind", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_a_compressor_that_extends_one_of_ours(ring: None, kind: Any) -> None:
    """Programs for Horovod call the methods of the base class, which convert there."""

    class Twice(kind):  # type: ignore[misc]
        @staticmethod
        def compress(tensor: Any) -> Any:
            return kind.compress(tensor * 2)

    class Renamed(kind):  # type: ignore[misc]
        pass

    half, dtype = kind.compress(tf.constant([1.0]))
    assert (half.dtype, dtype) == (tf.as_dtype(half.dtype.name), tf.float32)
    assert half.dtype.size == 2 and kind.decompress(half, dtype).dtype == tf.float32
    assert kind.compress(tf.constant([1]))[0].dtype == tf.int32
    for collective in (hvd.allreduce, hvd.reducescatter):
        assert collective(tf.constant([3.0]), compression=Twice).numpy() == [6.0]
        exact = collective(tf.constant([1 + 2.0**-20]), compression=Renamed)
        assert exact.numpy() == np.float32(1 + 2.0**-20)  # with one rank nothing travels


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_factors_are_not_rounded_to_the_dtype_of_the_tensor(ring: None, dtype: Any) -> None:
    result = hvd.allreduce(
        tf.ones([1], dtype), op=hvd.Sum, prescale_factor=1e-3, postscale_factor=1e5
    )
    small = tf.cast(tf.constant([1e-3]), dtype)
    np.testing.assert_array_equal(result, tf.cast(tf.cast(small, tf.float32) * 1e5, dtype))


def test_averages_and_products_of_integers_are_truncated(ring: None) -> None:
    large = hvd.allreduce(tf.constant([2**31 - 9]), prescale_factor=0.3)
    assert large.numpy().tolist() == [644245091]  # float32 has no number that is near to 0.3
    x = tf.constant([-7, 7, 2**24 + 1])
    assert hvd.allreduce(x).numpy().tolist() == x.numpy().tolist()
    halves = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5)
    assert halves.dtype == tf.int32 and halves.numpy().tolist() == [-3, 3, 2**23]
    (part,) = hvd.grouped_reducescatter([x], postscale_factor=0.5)
    assert part.numpy().tolist() == [-3, 3, 2**23]


def test_refusals_are_errors_that_horovod_raises(ring: None) -> None:
    def call() -> Any:
        return hvd.alltoall(tf.ones([2]), splits=[1])

    for kind in (hostopt.ConfigError, tf.errors.InvalidArgumentError, ValueError):
        with pytest.raises(kind):
            call()
    with pytest.raises(tf.errors.InvalidArgumentError, match="whose sum is 2"):
        tf.function(call, autograph=False)()
    hvd.shutdown()
    hvd.init()
    with tf.Graph().as_default(), v1.Session() as session:
        result = call()
        with pytest.raises(tf.errors.InvalidArgumentError, match="whose sum is 2"):
            session.run(result)


def test_a_refusal_keeps_its_type_in_code_that_autograph_converts(ring: None) -> None:
    @tf.function
    def reduce(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Adasum)

    with pytest.raises(hostopt.ConfigError, match="op is Adasum") as caught:
        reduce(tf.ones([1]))
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    "collective",
    [hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.reducescatter, hvd.alltoall],
)
def test_gradient_of_a_result_whose_rows_are_gathered(
    ring: None, collective: Callable[[Any], Any], mode: str
) -> None:
    x = tf.Variable(tf.ones([4, 2]))

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(collective(x), [0, 0, 1]))
        return tf.convert_to_tensor(tape.gradient(total, x))

    result = (tf.function(gradient) if mode == "function" else gradient)()
    np.testing.assert_array_equal(result, [[2, 2], [1, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn"])
def test_broadcast_of_small_floats(ring: None, name: str) -> None:
    dtype = getattr(tf.dtypes.experimental, name)
    result = hvd.broadcast(tf.cast(tf.constant([1.0, 2.0]), dtype), 0)
    assert result.dtype == dtype
    np.testing.assert_array_equal(tf.cast(result, tf.float32), [1, 2])


@pytest.mark.parametrize("collective", [hvd.allreduce, hvd.allgather])
def test_forward_mode_derivative(ring: None, collective: Callable[[Any], Any]) -> None:
    x, tangent = tf.ones([3, 2]), tf.reshape(tf.range(6.0), [3, 2])
    with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
        result = collective(x)
    np.testing.assert_array_equal(accumulator.jvp(result), tangent)
