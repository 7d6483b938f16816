"""File descriptors: the raised limit, and errors if none is left."""

from __future__ import annotations

import errno
import resource

import pytest

from hostopt.errors import CheckpointError, ResourceError
from hostopt.process import descriptors


@pytest.mark.parametrize("hard", [3000, 1 << 20, resource.RLIM_INFINITY])
def test_the_limit_is_raised_to_the_hard_limit_but_never_to_a_million(
    monkeypatch: pytest.MonkeyPatch, hard: int
) -> None:
    limits = [1024, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    descriptors.raise_limit()
    expected = 3000 if hard == 3000 else descriptors.MAX_DESCRIPTORS
    assert limits == [expected, hard]
    assert descriptors.limit() == expected
    limits[0] = resource.RLIM_INFINITY
    descriptors.raise_limit()
    assert limits[0] == resource.RLIM_INFINITY
    assert descriptors.limit() == descriptors.MAX_DESCRIPTORS


@pytest.mark.parametrize(
    ("error", "is_out"),
    [
        (OSError(errno.EMFILE, "no more"), True),
        (OSError(errno.ENFILE, "no more"), True),
        (RuntimeError("/model/events; Too many open files"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (CheckpointError("cannot save: Too many open files"), False),
    ],
)
def test_errors_caused_by_missing_descriptors(error: Exception, is_out: bool) -> None:
    assert descriptors.is_out(error) == is_out
    if is_out:
        with pytest.raises(ResourceError, match="no file descriptor is left"):
            descriptors.check(error)
    else:
        descriptors.check(error)
    descriptors.check_room()
