"""Loads handwritten digits: IDX files, the Keras copy of MNIST, or the small digits beside it."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import math
import os
import queue
import struct
import threading
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SIDE = 28
CLASSES = 10
IMAGE_MAGIC = 0x00000803  # unsigned bytes, three dimensions
LABEL_MAGIC = 0x00000801  # unsigned bytes, one dimension
DIGITS_TEST_EVERY = 5


class DataError(Exception):
    """The requested data cannot be used. The message says what was found and expected."""


class DownloadError(Exception):
    """The Keras copy cannot be downloaded at the moment."""


@dataclass(frozen=True)
class Digits:
    """A data set.

    Args:
      x_train: images, uint8 [n, 28, 28], 0 (paper) to 255 (ink).
      y_train: digits, uint8 [n], 0 to 9.
      x_test: images, uint8 [m, 28, 28].
      y_test: digits, uint8 [m].
      source: one line that names the source.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    source: str


def _keras_cache() -> Path:
    home = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    return Path(home) / "datasets" / "mnist.npz"


@dataclass(frozen=True)
class KerasCopy:
    """Settings of the Keras copy of MNIST.

    Args:
      url: address to download from.
      sha256: expected digest of the download, in hexadecimal.
      cache: path of the file, which Keras uses, too.
      deadline_s: seconds for the whole download, including the name lookup.
      retry_after_s: seconds before any process retries a failed download.
    """

    url: str = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
    sha256: str = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
    cache: Path = field(default_factory=_keras_cache)
    deadline_s: float = 20.0
    retry_after_s: float = 120.0


def load(data_dir: str | None = None, keras: KerasCopy | None = None) -> Digits:
    """Loads the first available source: IDX files, the Keras copy, or the small digits.

    Args:
      data_dir: directory of the four IDX files; None means MNIST_DIR of the environment, if set.
      keras: settings of the Keras copy; None means the defaults.

    Raises:
      DataError: the files of the named directory cannot be used.
    """
    directory = data_dir if data_dir is not None else os.environ.get("MNIST_DIR") or None
    if directory is not None:
        return load_idx(Path(directory))
    try:
        return load_keras(keras or KerasCopy())
    except DownloadError as error:
        return load_digits(why=str(error))


# --- IDX files -----------------------------------------------------------------------------------


def load_idx(directory: Path) -> Digits:
    """Loads the four IDX files of a directory, each plain or .gz.

    Raises:
      DataError: a file is missing or malformed, or images and labels do not match.
    """
    x_train, y_train = _read_split(directory, "train")
    x_test, y_test = _read_split(directory, "t10k")
    return Digits(
        x_train, y_train, x_test, y_test, _source(f"IDX files in {directory}", x_train, x_test)
    )


def parse_idx(raw: bytes, magic: int, name: str) -> np.ndarray:
    """Parses one IDX file: a magic number, one size per dimension, then the bytes.

    Args:
      raw: contents of the file, decompressed.
      magic: expected magic number; its last byte is the number of dimensions.
      name: name of the file for error messages.

    Returns:
      uint8 array with the shape in the header.

    Raises:
      DataError: wrong magic number or length.
    """
    dimensions = magic & 0xFF
    header_bytes = 4 + 4 * dimensions
    if len(raw) >= 4 and raw[:4] != magic.to_bytes(4, "big"):
        raise DataError(f"{name}: magic number 0x{raw[:4].hex()}, wanted 0x{magic:08x}")
    if len(raw) < header_bytes:
        raise DataError(f"{name}: {len(raw)} bytes, wanted a header of {header_bytes} bytes")
    shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    wanted_bytes = header_bytes + math.prod(shape)
    if len(raw) != wanted_bytes:
        raise DataError(
            f"{name}: {len(raw)} bytes, wanted {wanted_bytes} (header + shape {shape})"
        )
    return np.frombuffer(raw, np.uint8, offset=header_bytes).reshape(shape)


def _read_split(directory: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    images_file = _find(directory, f"{split}-images-idx3-ubyte")
    labels_file = _find(directory, f"{split}-labels-idx1-ubyte")
    images = parse_idx(_read_bytes(images_file), IMAGE_MAGIC, str(images_file))
    labels = parse_idx(_read_bytes(labels_file), LABEL_MAGIC, str(labels_file))
    _check(images, labels, str(images_file), str(labels_file))
    return images, labels


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    found = "no such directory"
    if directory.is_dir():
        found = "found " + (
            ", ".join(sorted(p.name for p in directory.iterdir())[:8]) or "nothing"
        )
    raise DataError(f"{directory}: wanted {name} or {name}.gz, {found}")


def _read_bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}; wanted an IDX file, plain or gzip") from error


def _check(images: np.ndarray, labels: np.ndarray, images_name: str, labels_name: str) -> None:
    if images.ndim != 3 or images.shape[1:] != (SIDE, SIDE) or images.dtype != np.uint8:
        raise DataError(
            f"{images_name}: {images.dtype} {list(images.shape)}, wanted uint8 [n, {SIDE}, {SIDE}]"
        )
    if not len(images):
        raise DataError(f"{images_name}: 0 images, wanted at least 1")
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{labels_name}: labels of shape {list(labels.shape)}, "
            f"wanted one for each of the {len(images)} images of {images_name}"
        )
    if labels.max() >= CLASSES:
        raise DataError(f"{labels_name}: label {labels.max()}, wanted 0 to {CLASSES - 1}")


def _source(origin: str, x_train: np.ndarray, x_test: np.ndarray) -> str:
    return f"{origin}: {len(x_train):,} training and {len(x_test):,} test images"


# --- the Keras copy ------------------------------------------------------------------------------


def load_keras(keras: KerasCopy) -> Digits:
    """Loads MNIST from the cache file of Keras, and downloads it first if it is missing.

    One of several processes downloads the file while the others wait. A failure is noted in a file
    next to the cache, so that not every process waits for a host that cannot be reached.

    Raises:
      DownloadError: there is no usable cache file, and the download failed.
    """
    digits = _read_cache(keras.cache)
    if digits is not None:
        return digits
    try:
        keras.cache.parent.mkdir(parents=True, exist_ok=True)
        with _locked(_beside(keras.cache, ".lock"), keras.deadline_s + 5):
            digits = _read_cache(keras.cache)  # another process may have been faster
            return digits if digits is not None else _download(keras)
    except OSError as error:  # the home directory cannot be written to
        raise DownloadError(f"{keras.cache}: {error}") from error


def _read_cache(path: Path) -> Digits | None:
    try:
        return _parse_npz(path.read_bytes(), str(path))
    except (OSError, DataError):
        return None


def _parse_npz(raw: bytes, name: str) -> Digits:
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
            x_train, y_train, x_test, y_test = (
                arrays[key] for key in ("x_train", "y_train", "x_test", "y_test")
            )
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{name}: {error}; wanted the .npz file of Keras's MNIST") from error
    _check(x_train, y_train, f"{name}[x_train]", f"{name}[y_train]")
    _check(x_test, y_test, f"{name}[x_test]", f"{name}[y_test]")
    return Digits(x_train, y_train, x_test, y_test, _source(f"Keras copy {name}", x_train, x_test))


def _download(keras: KerasCopy) -> Digits:
    """Downloads, checks and stores the file; the caller holds the lock."""
    note = _beside(keras.cache, ".failed")
    _raise_recent_failure(note, keras.retry_after_s)
    try:
        raw = _fetch(keras.url, keras.deadline_s)
        digest = hashlib.sha256(raw).hexdigest()
        if digest != keras.sha256:
            raise DownloadError(f"{keras.url}: sha256 {digest}, wanted {keras.sha256}")
        try:
            digits = _parse_npz(raw, str(keras.cache))
        except DataError as error:
            raise DownloadError(str(error)) from error
    except DownloadError as error:
        note.write_text(str(error))
        raise
    _write_atomically(keras.cache, raw)
    note.unlink(missing_ok=True)
    return digits


def _raise_recent_failure(note: Path, retry_after_s: float) -> None:
    with contextlib.suppress(FileNotFoundError):
        age_s = time.time() - note.stat().st_mtime
        if 0 <= age_s < retry_after_s:
            raise DownloadError(f"an attempt {age_s:.0f} s ago failed: {note.read_text()}")


def _fetch(url: str, deadline_s: float) -> bytes:
    """Reads a URL within a deadline.

    The timeout of urlopen covers neither the name lookup nor the sum of slow reads. So the request
    runs in a daemon thread, which is abandoned at the deadline.
    """
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def request() -> None:
        try:
            with urllib.request.urlopen(url, timeout=deadline_s) as response:
                answers.put(response.read())
        except Exception as error:  # handed over to the caller
            answers.put(error)

    threading.Thread(target=request, name="mnist-download", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline_s)
    except queue.Empty:
        raise DownloadError(f"{url}: not complete after {deadline_s:g} s") from None
    if isinstance(answer, Exception):
        raise DownloadError(f"{url}: {answer}") from answer
    return answer


def _write_atomically(path: Path, raw: bytes) -> None:
    part = _beside(path, f".{os.getpid()}.part")
    try:
        part.write_bytes(raw)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    """Holds a lock between processes, which the system releases if the holder dies."""
    give_up = time.monotonic() + deadline_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise DownloadError(f"{path}: held for over {deadline_s:g} s") from None
                time.sleep(0.05)
        yield


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


# --- small digits --------------------------------------------------------------------------------


def load_digits(why: str = "") -> Digits:
    """Loads the 1,797 digits of 8x8 pixels in digits.npz. Needs no network.

    Every fifth image is a test image. Each pixel becomes 3x3 pixels, with a margin of 2. They are
    the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998).

    Args:
      why: reason why MNIST could not be used, for the source line.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        ink, labels = file["images"], file["labels"]  # uint8 [1797, 8, 8], 0 to 16; uint8 [1797]
    images = np.rint(ink * (255 / 16)).astype(np.uint8)
    images = np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    test = np.arange(len(images)) % DIGITS_TEST_EVERY == DIGITS_TEST_EVERY - 1
    origin = "small digits" + (f" (no MNIST: {why})" if why else "")
    source = _source(origin, images[~test], images[test])
    return Digits(images[~test], labels[~test], images[test], labels[test], source)
