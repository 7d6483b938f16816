"""Files of model_dir, mutated at random: read as they were, or refused as a CheckpointError."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from structures import FUZZ_EXAMPLES

import estimator_ext
import hostopt
from estimator_ext.checkpoints import input_state_file
from estimator_ext.checkpoints import reading as checkpoint_reading

estimator_ext.install()


MOST_MORE_KB = 200 << 10  # of memory, for files of a kilobyte
fuzz = settings(
    max_examples=FUZZ_EXAMPLES,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

# -- mutations -----------------------------------------------------------------------------

KINDS = ("flip", "cut", "insert", "overwrite", "move", "double", "splice")
NOTE_BYTES = 8  # of one change: kind, begin, end and new bytes
notes = st.binary(min_size=NOTE_BYTES, max_size=4 * NOTE_BYTES)


def mutated(content: bytes, other: bytes, note: bytes) -> bytes:
    """Applies changes to the content, each at an offset or to a range.

    Args:
      content: content of a file.
      other: content of another file of this kind, from which parts are copied.
      note: NOTE_BYTES for each change.
    """
    for k in range(0, len(note) - NOTE_BYTES + 1, NOTE_BYTES):
        kind, data = KINDS[note[k] % len(KINDS)], note[k + 5 : k + NOTE_BYTES]
        places = (int.from_bytes(note[k + i : k + i + 2], "big") for i in (1, 3))
        begin, end = sorted(place % (len(content) + 1) for place in places)
        head, part, tail = content[:begin], content[begin:end], content[end:]
        if kind == "flip":
            bit = bytes(byte ^ (1 << data[0] % 8) for byte in content[begin : begin + 1])
            content = head + bit + content[begin + 1 :]
        elif kind == "cut":
            content = head + tail
        elif kind == "insert":
            content = head + data + part + tail
        elif kind == "overwrite":
            content = head + data + content[begin + len(data) :]
        elif kind == "move":  # such as one field to the offset of another one
            content = head + tail + part
        elif kind == "double":
            content = head + part + part + tail
        elif kind == "splice":
            content = head + other[begin:end] + tail
    return content


@pytest.fixture(autouse=True)
def no_huge_memory() -> Iterator[None]:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MOST_MORE_KB


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory in memory, because each example writes a file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


# -- the state of the data -----------------------------------------------------------------


def states(number: int, ranks: int) -> list[bytes]:
    attributes = {"pipelines": [number, 7], "parts": [2, 1]}
    parts = [b"first iterator", bytes(20), f"second of {number}".encode()]
    return [input_state_file.pack(attributes, parts)] * ranks


def write_states(checkpoint: str, number: int, ranks: int) -> Path:
    attributes = {"process": f"process {number}", "step": checkpoint.rpartition("-")[2]}
    input_state_file.write(checkpoint, attributes, states(number, ranks))
    return Path(f"{checkpoint}.input")


def read_states(checkpoint: str) -> Any:
    try:
        return input_state_file.read(checkpoint)
    except hostopt.CheckpointError as error:
        assert "emove it to read the data from the beginning" in str(error)
        return None


def test_mutated_input_states(directory: Path) -> None:
    checkpoint = str(directory / "model.ckpt-7")
    other = write_states(str(directory / "model.ckpt-8"), 5, 3).read_bytes()
    path = write_states(checkpoint, 3, 2)
    content, whole = path.read_bytes(), read_states(checkpoint)
    assert whole.parts == states(3, 2)

    @fuzz
    @given(notes)
    def check(note: bytes) -> None:
        path.write_bytes(mutated(content, other, note))
        assert read_states(checkpoint) in (None, whole)

    check()


# where the header of a file has something else
VALUES = [None, True, -1, 0, 1, 2, 1.5, float("nan"), 10**30, "", "9", "x", {}, {"x": 1}]
LISTS = [[value] for value in VALUES] + [[], [1, 0], [0, 0, 1], [[1]]]
fields = st.dictionaries(
    st.sampled_from(["process", "step", "pipelines", "parts", "batches", "checksum", "x"]),
    st.sampled_from(VALUES + LISTS),
    max_size=2,
)


@pytest.mark.parametrize(
    ("attributes", "parts"),
    [({"parts": [1]}, [b"some bytes"]), ({"batches": 1, "checksum": 0}, [])],
)
def test_input_states_with_a_correct_checksum_and_wrong_fields(
    directory: Path, attributes: dict[str, Any], parts: list[bytes]
) -> None:
    """The checksum is that of the content, as after a deliberate change."""
    checkpoint = str(directory / "model.ckpt-9")

    @fuzz
    @given(fields, fields, st.just(b"") | notes)
    def check(outer: dict[str, Any], inner: dict[str, Any], note: bytes) -> None:
        state = input_state_file.pack({"pipelines": [1], **attributes, **inner}, parts)
        state = mutated(state, state, note)
        input_state_file.write(checkpoint, {"process": "x", "step": "9", **outer}, [state])
        result = read_states(checkpoint)
        assert result is None or result.parts == [state]

    check()


@pytest.mark.parametrize("change", ["flip", "cut", "append"])
def test_each_changed_byte_of_an_input_state_is_detected(directory: Path, change: str) -> None:
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
    """Saves a small checkpoint with several kinds of tensors."""
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
    """Returns the tensors of a checkpoint, if `check` accepts it."""
    try:
        checkpoint_reading.check(path)
    except hostopt.CheckpointError:
        return None
    reader = tf.compat.v1.train.NewCheckpointReader(path)
    names = reader.get_variable_to_shape_map()
    return {name: reader.get_tensor(name).tolist() for name in names}


@pytest.mark.parametrize("part", ["index", "data-00000-of-00001"])
def test_mutated_checkpoints(directory: Path, part: str) -> None:
    other = Path(f"{save(directory, 4)}.{part}").read_bytes()
    path = save(directory, 5)
    file, whole = Path(f"{path}.{part}"), read_checkpoint(path)
    content = file.read_bytes()

    @fuzz
    @given(notes)
    def check(note: bytes) -> None:
        file.write_bytes(mutated(content, other, note))
        assert read_checkpoint(path) in (None, whole)

    check()


def test_mutated_checkpoint_files(directory: Path) -> None:
    """A file that does not name an intact checkpoint is refused."""
    path = save(directory, 4), save(directory, 5)
    file = directory / "checkpoint"
    content = file.read_bytes()

    @fuzz
    @given(notes)
    def check(note: bytes) -> None:
        file.write_bytes(mutated(content, content.replace(b"5", b"4"), note))
        try:
            checkpoint_reading.check_newest(str(directory), restore_previous=False)
        except hostopt.CheckpointError:
            return
        assert os.path.normpath(checkpoint_reading.newest(str(directory))) in path

    check()
