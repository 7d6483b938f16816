"""Fixtures: rings of ranks, clusters of processes, the launcher."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from certificates import Certificates
from harness import (
    ROOT,
    deadline_s,
    default_signals,
    is_gone,
    listens,
    reserved_addresses,
    until,
)
from launcher import Launcher
from ranks import Ranks
from rings import RankProcesses, Spawn
from xdist.scheduler import LoadFileScheduling

from hostopt.launch.task_group import FORWARDED

# a busy machine must not fail a test
hypothesis.settings.register_profile(
    "hostopt",
    deadline=None,
    max_examples=500,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("hostopt")


_OF_TENSORFLOW = re.compile(r"^pytestmark = [^\]]*mark\.tensorflow", re.MULTILINE)
_OF_SLOW_TESTS = re.compile(r"^pytestmark = [^\]]*mark\.(tensorflow|launchers)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips modules of TensorFlow tests if none is to run, as their imports take seconds."""
    if "not tensorflow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return bool(_OF_TENSORFLOW.search(collection_path.read_text())) or None


@functools.cache
def _stays_together(path: str) -> bool:
    """Returns True if the tests of a file share a fixture, such as trainings, or are fast."""
    text = (ROOT / path).read_text()
    return 'scope="module"' in text or not _OF_SLOW_TESTS.search(text)


class Scheduler(LoadFileScheduling):
    """Gives the tests that stay together to one process, and all others one by one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if _stays_together(path) else nodeid


@pytest.hookimpl(optionalhook=True)  # for runs without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts whole files first, as the last ones would keep only one processor busy."""
    items.sort(key=lambda item: not _stays_together(str(item.path)))


@pytest.fixture(params=["inproc", "grpc", "grpc+tcp", "shm", "hosts"])
def spawn(request: pytest.FixtureRequest) -> Spawn:
    """`spawn(size, fn, **options)`, over every transport in turn."""
    return Spawn(request.param)


@pytest.fixture(params=["inproc", "grpc", "grpc+tcp"])
def spawn_ring(request: pytest.FixtureRequest) -> Spawn:
    """`spawn` over one ring of all ranks, without shared memory."""
    return Spawn(request.param)


@pytest.fixture
def spawn_inproc() -> Spawn:
    """`spawn` without sockets, for tests that do not depend on the transport."""
    return Spawn("inproc")


@pytest.fixture
def spawn_grpc() -> Spawn:
    """`spawn` with all data in gRPC messages."""
    return Spawn("grpc")


@pytest.fixture
def spawn_tcp() -> Spawn:
    """`spawn` with data on sockets, beside gRPC."""
    return Spawn("grpc+tcp")


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Fails a test that leaves a thread in this process."""
    threads = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(deadline_s(10))
        assert not thread.is_alive(), f"left by the test: {thread}"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[[int], RankProcesses]]:
    """`processes(size)` starts a ring of processes; fails the test if one remains."""
    with contextlib.ExitStack() as stack:
        rings: list[RankProcesses] = []
        reserved: list[str] = []

        def new(size: int) -> RankProcesses:
            addresses = stack.enter_context(reserved_addresses(size))
            reserved.extend(addresses)
            rings.append(RankProcesses(addresses, tmp_path))
            return rings[-1]

        yield new
        left = [name for ring in rings for name in ring.end()]
        left += [address for address in reserved if listens(address)]
        assert not left, f"left by the test: {', '.join(left)}"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Programs as processes of a cluster; remaining ones are killed."""
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.end()


@pytest.fixture(scope="session", autouse=True)
def signals_not_ignored() -> Iterator[None]:
    """Started processes do not ignore SIGINT; a shell starts background jobs that do."""
    with default_signals():
        yield


@pytest.fixture
def forwarded_signals_not_ignored() -> Iterator[None]:
    """Started processes do not ignore the other signals that `hostopt run` forwards."""
    with default_signals(FORWARDED):
        yield


@pytest.fixture
def launcher(tmp_path: Path, forwarded_signals_not_ignored: None) -> Iterator[Launcher]:
    """`hostopt run` as a process; fails the test if a task that noted its pid remains."""
    notes = tmp_path / "notes"
    notes.mkdir()
    launcher = Launcher(notes)
    yield launcher
    noted = [int(path.suffix[1:]) for path in notes.iterdir()]
    for process in launcher.started:
        process.kill()
        process.wait()
    until(lambda: all(map(is_gone, noted)), "end of all children")
