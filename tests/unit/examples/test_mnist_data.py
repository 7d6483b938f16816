"""Data of the MNIST example: IDX files, order of sources, errors, and a single download."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import importlib.util
import io
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Process, until

DATA_PY = ROOT / "examples" / "mnist" / "data.py"


def import_by_path() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_data", DATA_PY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need their module there
    spec.loader.exec_module(module)
    return module


data = import_by_path()


def idx(array: np.ndarray, magic: int) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def make_split(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    return images, random.integers(0, 10, n, dtype=np.uint8)


@pytest.fixture
def split() -> dict[str, np.ndarray]:
    x_train, y_train = make_split(7, 0)
    x_test, y_test = make_split(3, 1)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


@pytest.fixture
def idx_dir(tmp_path: Path, split: dict[str, np.ndarray]) -> Path:
    """Writes plain training files and compressed test files."""
    directory = tmp_path / "idx"
    directory.mkdir()
    for key, name in (("train", "train"), ("test", "t10k")):
        files = {
            f"{name}-images-idx3-ubyte": idx(split[f"x_{key}"], 0x803),
            f"{name}-labels-idx1-ubyte": idx(split[f"y_{key}"], 0x801),
        }
        for file, raw in files.items():
            if key == "train":
                (directory / file).write_bytes(raw)
            else:
                (directory / f"{file}.gz").write_bytes(gzip.compress(raw))
    return directory


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "*")


def assert_same(digits: Any, split: dict[str, np.ndarray]) -> None:
    for key, array in split.items():
        np.testing.assert_array_equal(getattr(digits, key), array)
        assert getattr(digits, key).dtype == np.uint8


def npz(split: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **split)
    return file.getvalue()


# --- IDX files


def test_idx_files_plain_and_packed(idx_dir: Path, split: dict[str, np.ndarray]) -> None:
    digits = data.load(str(idx_dir))
    assert_same(digits, split)
    assert digits.source == f"IDX files in {idx_dir}: 7 training and 3 test images"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "train-images-idx3-ubyte",
            idx(np.zeros(7, "u1"), 0x801),
            "0x00000801, wanted 0x00000803",
        ),
        ("train-images-idx3-ubyte", idx(np.zeros((7, 8, 8), "u1"), 0x803), r"\[7, 8, 8\], wanted"),
        ("train-images-idx3-ubyte", idx(np.zeros((0, 28, 28), "u1"), 0x803), "0 images"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03\0", "5 bytes, wanted a header of 16 bytes"),
        ("train-labels-idx1-ubyte", idx(np.zeros(7, "u1"), 0x801)[:-2], "13 bytes, wanted 15"),
        ("train-labels-idx1-ubyte", idx(np.zeros(7, "u1"), 0x801) + b"x", "16 bytes, wanted 15"),
        ("train-labels-idx1-ubyte", idx(np.zeros(6, "u1"), 0x801), "each of the 7 images"),
        ("train-labels-idx1-ubyte", idx(np.full(7, 10, "u1"), 0x801), "label 10, wanted 0 to 9"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(b"abc" * 99)[:-9], "wanted an IDX file"),
    ],
    ids=[
        "magic",
        "image size",
        "no images",
        "short header",
        "truncated",
        "too long",
        "label count",
        "label value",
        "truncated gzip",
    ],
)
def test_malformed_file_is_named(idx_dir: Path, file: str, content: bytes, message: str) -> None:
    (idx_dir / file).write_bytes(content)
    with pytest.raises(data.DataError, match=message) as caught:
        data.load(str(idx_dir))
    assert file in str(caught.value)


def test_missing_file_is_named(idx_dir: Path) -> None:
    (idx_dir / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        data.DataError, match=r"wanted t10k-labels-idx1-ubyte or .*, found t10k-im"
    ):
        data.load(str(idx_dir))


# --- order of sources


def test_argument_before_environment(
    idx_dir: Path, split: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MNIST_DIR", str(idx_dir / "absent"))
    assert_same(data.load(str(idx_dir)), split)
    with pytest.raises(data.DataError, match="no such directory"):
        data.load()


def test_environment_before_keras_copy(
    idx_dir: Path, split: dict[str, np.ndarray], keras: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras.cache.write_bytes(npz({**split, "x_train": split["x_train"][::-1]}))
    monkeypatch.setenv("MNIST_DIR", str(idx_dir))
    assert_same(data.load(keras=keras), split)


def test_named_directory_has_no_fallback(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="found nothing"):
        data.load(str(tmp_path))


def test_keras_cache_before_digits(keras: Any, split: dict[str, np.ndarray]) -> None:
    keras.cache.write_bytes(npz(split))
    assert_same(data.load(keras=keras), split)


def test_keras_home_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert data.KerasCopy().cache == tmp_path / "datasets" / "mnist.npz"


# --- small digits


@pytest.fixture
def keras(tmp_path: Path) -> Iterator[Any]:
    """A host that refuses connections: the port is bound, but nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/mnist.npz"
        yield data.KerasCopy(url=url, cache=tmp_path / "mnist.npz", deadline_s=5.0)


def test_digits_shape_range_and_split(keras: Any) -> None:
    digits = data.load(keras=keras)
    assert digits.x_train.shape == (1438, 28, 28)
    assert digits.x_test.shape == (359, 28, 28)
    assert digits.y_train.shape == (1438,)
    assert digits.y_test.shape == (359,)
    for array in (digits.x_train, digits.y_train, digits.x_test, digits.y_test):
        assert array.dtype == np.uint8
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 255)
    assert set(digits.y_test) == set(range(10))
    assert digits.source.startswith("small digits (no MNIST: http://127.0.0.1")
    assert digits.source.endswith("1,438 training and 359 test images")
    assert "\n" not in digits.source


def test_every_fifth_digit_is_a_test_image() -> None:
    digits = data.load_digits()
    # the first digits are 0 to 9, twice
    np.testing.assert_array_equal(digits.y_test[:4], [4, 9, 4, 9])
    np.testing.assert_array_equal(digits.y_train[:8], [0, 1, 2, 3, 5, 6, 7, 8])


def test_a_pixel_of_a_small_digit_becomes_nine() -> None:
    zero = data.load_digits().x_train[0]
    middle = [0, 0, 5, 13, 9, 1, 0, 0]  # the first row of the first image, at most 16
    np.testing.assert_array_equal(zero[2:5, 2:26:3], np.rint(np.array([middle] * 3) * 255 / 16))
    assert not zero[:2].any() and not zero[:, :2].any()


# --- download


class Server(http.server.ThreadingHTTPServer):
    """Serves a body while it is open, and counts the requests."""

    def __init__(self, body: bytes, announced_bytes: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = body
        self.announced_bytes = announced_bytes
        self.requests = 0
        self.is_open = threading.Event()
        self.is_open.set()

    def keras(self, cache: Path) -> Any:
        return data.KerasCopy(
            url=f"http://127.0.0.1:{self.server_address[1]}/mnist.npz",
            sha256=hashlib.sha256(self.body).hexdigest(),
            cache=cache,
            deadline_s=10.0,
        )


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests += 1
        self.server.is_open.wait()
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.announced_bytes))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(body: bytes, missing_bytes: int = 0) -> Server:
        server = Server(body, len(body) + missing_bytes)
        servers.append(server)
        poll = functools.partial(server.serve_forever, poll_interval=0.05)
        threading.Thread(target=poll, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_download_fills_the_cache(
    serve: Any, tmp_path: Path, split: dict[str, np.ndarray]
) -> None:
    server = serve(npz(split))
    keras = server.keras(tmp_path / "new" / "mnist.npz")
    assert_same(data.load(keras=keras), split)
    assert keras.cache.read_bytes() == server.body
    assert sorted(p.name for p in keras.cache.parent.iterdir()) == ["mnist.npz", "mnist.npz.lock"]


def test_damaged_cache_is_replaced(
    serve: Any, tmp_path: Path, split: dict[str, np.ndarray]
) -> None:
    server = serve(npz(split))
    keras = server.keras(tmp_path / "mnist.npz")
    keras.cache.write_bytes(server.body[:1000])
    assert_same(data.load(keras=keras), split)
    assert keras.cache.read_bytes() == server.body


LOAD = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("mnist_data", sys.argv[1])
data = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(data)
keras = data.KerasCopy(url=sys.argv[2], sha256=sys.argv[3], cache=pathlib.Path(sys.argv[4]))
print(data.load(keras=keras).source)
assert "tensorflow" not in sys.modules
"""


def has_lock_open(keras: Any, process: Process) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it has closed another file meanwhile
        files = Path(f"/proc/{process.pid}/fd").iterdir()
        return f"{keras.cache}.lock" in map(os.readlink, files)
    return False


def test_two_processes_download_once(
    serve: Any, tmp_path: Path, split: dict[str, np.ndarray]
) -> None:
    server = serve(npz(split))
    keras = server.keras(tmp_path / "mnist.npz")
    command = [sys.executable, "-c", LOAD, str(DATA_PY), keras.url, keras.sha256, str(keras.cache)]
    server.is_open.clear()
    processes = [Process(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    until(lambda: all(has_lock_open(keras, process) for process in processes), "both processes")
    server.is_open.set()
    sources = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sources == [f"Keras copy {keras.cache}: 7 training and 3 test images\n"] * 2
    assert server.requests == 1


def test_incomplete_download_leaves_no_file(
    serve: Any, tmp_path: Path, split: dict[str, np.ndarray]
) -> None:
    keras = serve(npz(split), missing_bytes=100).keras(tmp_path / "mnist.npz")
    with pytest.raises(data.DownloadError, match="IncompleteRead"):
        data.load_keras(keras)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mnist.npz.failed", "mnist.npz.lock"]


def test_failed_write_leaves_no_file(
    serve: Any,
    tmp_path: Path,
    split: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full_disk(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(data.DownloadError, match="disk full"):
        data.load_keras(serve(npz(split)).keras(tmp_path / "mnist.npz"))
    assert [p.name for p in tmp_path.iterdir()] == ["mnist.npz.lock"]


def test_wrong_digest_is_refused(serve: Any, tmp_path: Path, split: dict[str, np.ndarray]) -> None:
    server = serve(npz(split))
    keras = data.KerasCopy(url=server.keras(tmp_path).url, cache=tmp_path / "mnist.npz")
    with pytest.raises(data.DownloadError, match="sha256"):
        data.load_keras(keras)
    assert not keras.cache.exists()


def test_silent_host_ends_at_the_deadline_and_is_remembered(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mnist.npz"
        keras = data.KerasCopy(url=url, cache=tmp_path / "mnist.npz", deadline_s=0.05)
        with pytest.raises(data.DownloadError, match=r"not complete after 0.05 s|timed out"):
            data.load_keras(keras)
        with pytest.raises(data.DownloadError, match=r"an attempt \d+ s ago failed: "):
            data.load_keras(keras)


def test_failure_is_forgotten_after_a_while(
    serve: Any, tmp_path: Path, split: dict[str, np.ndarray]
) -> None:
    keras = serve(npz(split)).keras(tmp_path / "mnist.npz")
    note = tmp_path / "mnist.npz.failed"
    note.write_text("unreachable")
    long_ago = time.time() - keras.retry_after_s - 1
    os.utime(note, (long_ago, long_ago))
    assert_same(data.load_keras(keras), split)
    assert not note.exists()
