"""Files that several processes write and read at the same time."""

from __future__ import annotations

import os
from pathlib import Path

from harness import run_python, start_python

BEGIN = """
import os, sys
import tensorflow as tf
from estimator_ext.compat.atomic_files import write_atomically
write_atomically()
path = sys.argv[1]
"""


def test_concurrent_writers_and_readers_see_complete_files(tmp_path: Path) -> None:
    code = """
for _ in range(40):
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(300):
            writer.write(b"%d" % number * 50)
    found = sum(1 for _ in tf.compat.v1.io.tf_record_iterator(path))
    assert found == 300, found
"""
    processes = [start_python("-c", BEGIN + code, tmp_path / "records") for _ in range(3)]
    for process in processes:
        process.ended_with(0, 100)
    assert os.listdir(tmp_path) == ["records"]


def test_a_file_is_replaced_when_it_is_closed(tmp_path: Path) -> None:
    code = """
def read(name):
    with open(os.path.join(path, name)) as file:
        return file.read()

for mode in ("w", "wb"):
    name = os.path.join(path, "text") if mode == "w" else os.path.join(path, "text").encode()
    file = tf.io.gfile.GFile(name, mode)
    assert file.name == name
    file.write(f"new {mode}")
    file.flush()
    assert read("text") == f"new {mode}", "not flushed"
    file.write(" at last")
    assert read("text") == f"new {mode}"
    file.close()
    file.close()
    assert read("text") == f"new {mode} at last"
with tf.compat.v1.gfile.Open(os.path.join(path, "text"), "a") as file:
    file.write(" and more")
assert read("text") == "new wb at last and more"
os.symlink(os.path.join(path, "text"), os.path.join(path, "link"))
first, second = (tf.io.gfile.GFile(os.path.join(path, "link"), "w") for _ in range(2))
first.write("first")
second.write("second")
first.close()
second.close()
assert read("text") == "second" and os.path.islink(os.path.join(path, "link"))
for device in (tf.io.gfile.GFile("/dev/null", "w"), tf.io.TFRecordWriter("/dev/null")):
    device.write(b"x")
    device.close()
import stat
assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
tf.io.gfile.GFile(os.path.join(path, "dropped"), "w").write("closed by nobody")
assert read("dropped") == "closed by nobody"
with tf.io.gfile.GFile(os.path.join(path, "never written"), "w"):
    pass
writer = tf.compat.v1.python_io.TFRecordWriter(os.path.join(path, "records"), "GZIP")
writer.write(b"one")
writer.close()
options = tf.io.TFRecordOptions("GZIP")
assert list(tf.compat.v1.io.tf_record_iterator(f"{path}/records", options)) == [b"one"]
for make in (tf.io.TFRecordWriter, lambda name: tf.io.gfile.GFile(name, "w").write("x")):
    try:
        make(f"{path}/no/such directory")
    except tf.errors.NotFoundError:
        continue
    raise AssertionError("no error")
"""
    (tmp_path / "text").write_text("old")
    run_python("-c", BEGIN + code, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["dropped", "link", "records", "text"]


def test_a_file_keeps_its_permissions_and_its_other_names(tmp_path: Path) -> None:
    code = """
for mode in (0o600, 0o640, 0o666):
    secret = os.path.join(path, f"{mode:o}")
    os.close(os.open(secret, os.O_CREAT, 0o600))
    os.chmod(secret, mode)
    for content in ("longer than it is later", "flushed", "closed"):
        file = tf.io.gfile.GFile(secret, "w")
        file.write(content)
        drafts = [name for name in os.listdir(path) if name.startswith(".")]
        assert [os.stat(f"{path}/{name}").st_mode & 0o777 for name in drafts] == [mode], drafts
        file.flush()
        assert os.stat(secret).st_mode & 0o777 == mode
        file.close()
        assert os.stat(secret).st_mode & 0o777 == mode
        assert open(secret).read() == content
one, other = os.path.join(path, "one"), os.path.join(path, "other")
open(one, "w").write("old, and longer")
os.link(one, other)
file = tf.io.gfile.GFile(one, "w")
file.write("new")
file.flush()
assert open(other).read() == "new"
file.write(" text")
file.close()
assert open(other).read() == "new text" and os.path.samefile(one, other)
with tf.io.TFRecordWriter(other) as writer:
    writer.write(b"record")
assert list(tf.compat.v1.io.tf_record_iterator(one)) == [b"record"]
"""
    run_python("-c", BEGIN + code, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["600", "640", "666", "one", "other"]


def test_names_of_any_length(tmp_path: Path) -> None:
    code = """
for name in ("n" * 255, "\\N{GREEK SMALL LETTER ALPHA}" * 127, "s"):
    name = os.path.join(path, name)
    for content in ("first", "second"):
        file = tf.io.gfile.GFile(name, "w")
        file.write(content)
        file.flush()
        file.close()
        assert open(name).read() == content
"""
    run_python("-c", BEGIN + code, tmp_path)
    assert len(os.listdir(tmp_path)) == 3


def test_rank_0_alone_appends_to_a_file(tmp_path: Path) -> None:
    code = """
from estimator_ext.compat.atomic_files import write_atomically
rank = int(sys.argv[2])
write_atomically(rank)
for mode in ("a", "ab", "a+"):
    with tf.io.gfile.GFile(path, mode) as file:
        file.write(f"line of mode {mode}\\n")
    assert tf.io.gfile.GFile(path).read().endswith(f"line of mode {mode}\\n") or rank
try:
    with tf.io.gfile.GFile(f"{path}.d/no/such directory", "a") as file:
        file.write("lost")
except tf.errors.NotFoundError:
    pass
else:
    raise AssertionError("no error")
with tf.io.gfile.GFile("/dev/stdout", "a") as file:
    file.write(f"rank {rank}")
"""
    imports = BEGIN.partition("from estimator_ext")[0]
    log = tmp_path / "log"
    for rank in ("0", "1", "0"):
        ran = run_python("-c", f"{imports}path = sys.argv[1]{code}", log, rank)
        assert ran.stdout == f"rank {rank}"
    lines = "line of mode a\nline of mode ab\nline of mode a+\n"
    assert log.read_text() == lines * 2
    assert (tmp_path / ".rank-1" / "log").read_text() == lines
    assert sorted(os.listdir(tmp_path)) == [".rank-1", "log"]
