"""Files of model_dir, mutated at random: read as they were, or refused as a CheckpointError.

`HOSTOPT_FUZZ_EXAMPLES` is how many of each kind are tried.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import estimator_ext
import hostopt
from estimator_ext import checkpoints, input_state, input_state_file

estimator_ext.install()

pytestmark = [pytest.mark.tensorflow, pytest.mark.faults, pytest.mark.timeout(600)]

EXAMPLES = int(os.environ.get("HOSTOPT_FUZZ_EXAMPLES", "10000"))
MOST_MORE_KB = 200 << 10  # of memory, for files of a kilobyte
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# -- mutations -----------------------------------------------------------------------------

Mutation = tuple[str, float, float, bytes]
mutations: st.SearchStrategy[list[Mutation]] = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "overwrite", "move", "double", "splice"]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=4,
)


def mutated(content: bytes, other: bytes, changes: list[Mutation]) -> bytes:
    """Content after some changes, each at a place or over a range of it.

    Args:
      content: of a whole file.
      other: of another one of this kind, from which parts are taken.
      changes: kind, begin and end as parts of the length, and bytes.
    """
    for kind, first, second, data in changes:
        begin, end = sorted((int(first * len(content)), int(second * len(content))))
        part = content[begin:end]
        if kind == "flip" and begin < len(content):
            bit = bytes([content[begin] ^ (1 << data[0] % 8)])
            content = content[:begin] + bit + content[begin + 1 :]
        elif kind == "cut":
            content = content[:begin] + content[end:]
        elif kind == "insert":
            content = content[:begin] + data + content[begin:]
        elif kind == "overwrite":
            content = content[:begin] + data + content[begin + len(data) :]
        elif kind == "move":  # such as one field to the place of another one
            content = content[:begin] + content[end:] + part
        elif kind == "double":
            content = content[:end] + part + content[end:]
        elif kind == "splice":
            content = content[:begin] + other[begin:end] + content[end:]
    return content


@pytest.fixture(autouse=True)
def no_huge_memory() -> Iterator[None]:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MOST_MORE_KB


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """In memory: a file is written for each example."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


# -- the state of the data -----------------------------------------------------------------


def states(number: int, ranks: int) -> list[bytes]:
    facts = {"pipelines": [number, 7], "parts": [2, 1]}
    parts = [b"first iterator", bytes(20), f"second of {number}".encode()]
    return [input_state_file.pack(facts, parts)] * ranks


def write_states(checkpoint: str, number: int, ranks: int) -> Path:
    facts = {"process": f"process {number}", "step": checkpoint.rpartition("-")[2]}
    input_state_file.write(checkpoint, facts, states(number, ranks))
    return Path(f"{checkpoint}.input")


def read_states(checkpoint: str) -> Any:
    try:
        return input_state._load(checkpoint)
    except hostopt.CheckpointError as error:
        assert "Remove it to have the data begin anew" in str(error)
        return None


def test_states_of_the_data(directory: Path) -> None:
    checkpoint = str(directory / "model.ckpt-7")
    other = write_states(str(directory / "model.ckpt-8"), 5, 3).read_bytes()
    path = write_states(checkpoint, 3, 2)
    content, whole = path.read_bytes(), read_states(checkpoint)
    assert whole.parts == states(3, 2)

    @fuzz
    @given(mutations)
    def check(changes: list[Mutation]) -> None:
        path.write_bytes(mutated(content, other, changes))
        assert read_states(checkpoint) in (None, whole)

    check()


# what JSON can hold, where the header of a file has something else
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
names = st.sampled_from(["process", "step", "pipelines", "parts", "x"])


def test_states_with_a_right_checksum_and_wrong_fields(directory: Path) -> None:
    """What no accident makes: the checksum is that of the content."""
    checkpoint = str(directory / "model.ckpt-9")

    @fuzz
    @given(
        st.dictionaries(names, json_values), st.dictionaries(names, json_values), st.data()
    )
    def check(outer: Any, inner: Any, data: Any) -> None:
        base = {"process": "x", "step": "9"}
        inner_base = {"pipelines": [1], "parts": [1]}
        state = input_state_file.pack({**inner_base, **inner}, [b"x" * data.draw(st.integers(0, 9))])
        state = mutated(state, state, data.draw(st.just([]) | mutations))
        input_state_file.write(checkpoint, {**base, **outer}, [state])
        found = read_states(checkpoint)
        assert found is None or found.parts == [state]

    check()


@pytest.mark.parametrize("change", ["flip", "cut", "append"])
def test_every_single_change_of_a_state_is_found(directory: Path, change: str) -> None:
    checkpoint = str(directory / "model.ckpt-1")
    path = write_states(checkpoint, 3, 2)
    content = path.read_bytes()
    changed = {
        "flip": [flipped(content, bit) for bit in range(8 * len(content))],
        "cut": [content[:length] for length in range(len(content))],
        "append": [content + bytes(length) for length in (1, 7, 100)] + [content * 2],
    }[change]
    for each in changed:
        path.write_bytes(each)
        assert read_states(checkpoint) is None
    path.write_bytes(content)
    assert read_states(checkpoint) is not None


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# -- checkpoints ---------------------------------------------------------------------------


def save(directory: Path, number: int) -> str:
    """A small checkpoint of a few kinds of tensors."""
    path = str(directory / f"model.ckpt-{number}")
    tensors = {
        "global_step": tf.constant(number, tf.int64),
        "kernel": tf.range(number + 0.0, number + 9.0),
        "words": tf.constant(["a", "bc", f"{number}"]),
    }
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    (directory / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{number}"\n')
    return path


def read_checkpoint(path: str) -> dict[str, Any] | None:
    """What a checkpoint holds, if `check` finds no fault in it."""
    try:
        checkpoints.check(path)
    except hostopt.CheckpointError:
        return None
    reader = tf.compat.v1.train.NewCheckpointReader(path)
    names = reader.get_variable_to_shape_map()
    return {name: reader.get_tensor(name).tolist() for name in names}


@pytest.mark.parametrize("part", ["index", "data-00000-of-00001"])
def test_checkpoints(directory: Path, part: str) -> None:
    other = Path(f"{save(directory, 4)}.{part}").read_bytes()
    path = save(directory, 5)
    file, whole = Path(f"{path}.{part}"), read_checkpoint(path)
    content = file.read_bytes()

    @fuzz
    @given(mutations)
    def check(changes: list[Mutation]) -> None:
        file.write_bytes(mutated(content, other, changes))
        assert read_checkpoint(path) in (None, whole)

    check()


def test_the_file_checkpoint(directory: Path) -> None:
    """It names a checkpoint that is whole, or is refused; where it names none, too."""
    path = save(directory, 4), save(directory, 5)
    file = directory / "checkpoint"
    content = file.read_bytes()

    @fuzz
    @given(mutations)
    def check(changes: list[Mutation]) -> None:
        file.write_bytes(mutated(content, content.replace(b"5", b"4"), changes))
        try:
            checkpoints.check_newest(str(directory), restore_previous=False)
        except hostopt.CheckpointError:
            return
        assert os.path.normpath(checkpoints.newest(str(directory))) in path

    check()
