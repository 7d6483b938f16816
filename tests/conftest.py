"""Fixtures of all tests: rings of ranks, clusters of processes, the launcher."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from certificates import Certificates
from clocks import Clock
from harness import (
    deadline_s,
    default_signals,
    is_gone,
    listens,
    reserved_addresses,
    until,
)
from launcher import Launcher
from ranks import Ranks
from rings import TRANSPORTS, RankProcesses, Spawn
from served import Served

from hostopt.launch.task_group import FORWARDED

pytest_plugins = ["durations", "failed_ranks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly",
        action="store_true",
        help="rings over every transport, and ten times as many examples of hypothesis",
    )


def pytest_configure(config: pytest.Config) -> None:
    # no deadline: a busy machine must not fail a test
    hypothesis.settings.register_profile(
        "hostopt",
        deadline=None,
        max_examples=500 if config.option.nightly else 50,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("hostopt")


def pytest_collection_finish() -> None:
    gc.freeze()  # so that the tests do not look for garbage among all that is imported


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of algorithms on threads; the transports have a contract of their own."""
    for fixture, transports in TRANSPORTS.items():
        if fixture in metafunc.fixturenames:
            chosen = transports if metafunc.config.option.nightly else transports[:1]
            metafunc.parametrize(fixture, chosen, indirect=True)


@pytest.fixture
def spawn(request: pytest.FixtureRequest) -> Spawn:
    """`spawn(size, fn, **options)` in one ring of threads; at night over every transport."""
    return Spawn(request.param)


@pytest.fixture
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
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for modules of the product: see `Clock.govern`."""
    return Clock(monkeypatch)


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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Trainings whose data come from data workers; remaining processes are killed."""
    served = Served(tmp_path)
    yield served
    for process in served.launcher.started:
        process.kill()
        process.communicate()
