"""Rings for the tests: ranks as threads over each transport, and ranks as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from certificates import Certificates
from launcher import Launcher, is_gone, until
from ranks import Ranks, reserved_addresses

from hostopt.cluster import Cluster
from hostopt.communicator import Communicator
from hostopt.hosts import Hosts
from hostopt.options import Options
from hostopt.task_group import FORWARDED
from hostopt.transport.grpc import GrpcTransport
from hostopt.transport.inproc import InprocTransport

# a busy machine is no failure
hypothesis.settings.register_profile(
    "hostopt",
    deadline=None,
    max_examples=500,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("hostopt")

# Of each test that fuzzes: `FUZZ_EXAMPLES=100000 make test-faults` has more.
FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10000"))

ROOT = Path(__file__).resolve().parents[1]
# Ends a test that would hang; no result depends on it.
DEADLINE_S = 30.0


def jobs_of(addresses: list[str]) -> dict[str, list[str]]:
    """The "cluster" of TF_CONFIG: rank 0 is the chief, the others are workers."""
    return {"chief": addresses[:1], "worker": addresses[1:]}


def listens(address: str) -> bool:
    """True where somebody listens there."""
    with socket.socket() as caller:
        return caller.connect_ex(split_address(address)) == 0


def split_address(address: str) -> tuple[str, int]:
    """Host and port, as sockets take them."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def task_of(rank: int) -> tuple[str, int]:
    """Task type and index of a rank of `jobs_of`."""
    return ("chief", 0) if rank == 0 else ("worker", rank - 1)


class Spawn:
    """Runs a function as every rank of a ring, each rank a thread.

    Args:
      transport: ``inproc``; ``grpc`` over real loopback sockets; ``shm``, all ranks on one host;
        ``hosts``, two ranks on each host.
    """

    def __init__(self, transport: str) -> None:
        self.transport = transport

    def __call__(self, size: int, fn: Callable[[Communicator], Any], **options: Any) -> list[Any]:
        """Run `fn` on all ranks.

        Args:
          size: number of ranks.
          fn: called with the communicator of its rank.
          options: fields of `Options`.

        Returns:
          What `fn` returned, in rank order. The first exception of a rank is told to the others
          and raised once all have ended.
        """
        deadlines = {"collective_timeout_s": DEADLINE_S, "rendezvous_timeout_s": DEADLINE_S}
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                communicator = connect(rank)
            except BaseException as error:
                errors.append(error)
                return
            try:
                results[rank] = fn(communicator)
            except BaseException as error:
                errors.append(error)
                communicator.abort(error)
            finally:
                communicator.close()

        with self._ring(size, Options(**{**deadlines, **options})) as connect:
            threads = [
                threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
                for rank in range(size)
            ]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 3 * DEADLINE_S
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0))
            stuck = [thread.name for thread in threads if thread.is_alive()]
        if errors:
            raise errors[0]
        assert not stuck, f"{', '.join(stuck)} did not end"
        return results

    @contextlib.contextmanager
    def _ring(self, size: int, options: Options) -> Iterator[Callable[[int], Communicator]]:
        if self.transport != "grpc":
            transports = InprocTransport.connect(size, options)
            hosts = self._hosts(size)
            yield lambda rank: Communicator(transports[rank], hosts=hosts)
            return
        with reserved_addresses(size) as addresses:
            jobs = jobs_of(addresses)
            yield lambda rank: Communicator(
                GrpcTransport(Cluster.from_dict(jobs, *task_of(rank)), options)
            )

    def _hosts(self, size: int) -> Hosts | None:
        per_host = {"inproc": 1, "shm": size, "hosts": 2}[self.transport]
        ranks = range(size)
        groups = tuple(tuple(ranks[i : i + per_host]) for i in range(0, size, per_host))
        return Hosts(groups) if len(groups) < size else None


@pytest.fixture(params=["inproc", "grpc", "shm", "hosts"])
def spawn(request: pytest.FixtureRequest) -> Spawn:
    """`spawn(size, fn, **options)`, over every transport in turn."""
    return Spawn(request.param)


@pytest.fixture(params=["inproc", "grpc"])
def spawn_ring(request: pytest.FixtureRequest) -> Spawn:
    """`spawn` over one ring of all ranks, without shared memory."""
    return Spawn(request.param)


@pytest.fixture
def spawn_inproc() -> Spawn:
    """`spawn` without sockets, for what no transport can change."""
    return Spawn("inproc")


@pytest.fixture
def spawn_grpc() -> Spawn:
    """`spawn` over loopback sockets only."""
    return Spawn("grpc")


class RankProcess:
    """One rank as a process, in a process group of its own.

    Args:
      script: Python source; `sys.argv[1:]` are `arguments`.
      task: name of its task, such as ``worker:0``.
      environ: its environment.
      errors: file for its standard error.
      arguments: arguments of the script.
      through: program and arguments that run another one, such as ``ip netns exec <name>``.
    """

    def __init__(
        self,
        script: str,
        task: str,
        environ: dict[str, str],
        errors: Path,
        arguments: tuple[object, ...],
        through: Sequence[str] = (),
    ) -> None:
        self.task = task
        self._errors = errors
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [*through, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def line(self) -> str:
        """The next line that it prints; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def expect(self, line: str) -> None:
        """Wait for its next line, which must be `line`."""
        found = self.line()
        assert found == line, f"{self.task} printed {found!r} and to stderr:\n{self.stderr}"

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def go_on(self) -> None:
        """End its standard input, which `sys.stdin.read()` in the script waits for."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)

    def exit_code(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.task} did not end in time; its stderr:\n{self.stderr}")

    @property
    def stderr(self) -> str:
        """What it has written to standard error so far."""
        return self._errors.read_text()

    def end(self) -> bool:
        """Kill it with its group, reap it, and tell if anything of it was still running."""
        running = self.process.poll() is None
        if not running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 0)
                running = True  # its own children
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return running


class RankProcesses:
    """A ring of processes on reserved ports.

    Args:
      addresses: the address of each rank.
      directory: where their output goes.
      through: what each rank is started with, if it is; see `RankProcess`.
    """

    def __init__(
        self, addresses: list[str], directory: Path, through: Sequence[Sequence[str]] = ()
    ) -> None:
        self.addresses = addresses
        self.directory = directory
        self._through = through
        self._started: list[RankProcess] = []

    def name(self, rank: int) -> str:
        """A rank as messages show it."""
        type_, index = task_of(rank)
        return f"rank {rank} ({type_}:{index}, {self.addresses[rank]})"

    def start(
        self,
        rank: int,
        script: str,
        *arguments: object,
        jobs: dict[str, list[str]] | None = None,
        **environ: str,
    ) -> RankProcess:
        """Start one rank.

        Args:
          rank: which one.
          script: Python source.
          arguments: arguments of the script.
          jobs: "cluster" of its TF_CONFIG, if not that of all.
          environ: more variables of its environment.

        Returns:
          The process.
        """
        type_, index = task_of(rank)
        config = {
            "cluster": jobs or jobs_of(self.addresses),
            "task": {"type": type_, "index": index},
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HOSTOPT_")}
        process = RankProcess(
            script,
            f"{type_}:{index}",
            {
                **inherited,
                "PYTHONPATH": str(ROOT),
                "TF_CONFIG": json.dumps(config),
                "HOSTOPT_RENDEZVOUS_TIMEOUT_S": str(DEADLINE_S / 2),
                "HOSTOPT_COLLECTIVE_TIMEOUT_S": str(DEADLINE_S / 2),
                "HOSTOPT_COMMUNICATION": "grpc",
                **environ,
            },
            self.directory / f"stderr.{len(self._started)}",
            arguments,
            self._through[rank] if self._through else (),
        )
        self._started.append(process)
        return process

    def start_all(self, script: str, *arguments: object, **environ: str) -> list[RankProcess]:
        """Start every rank with the same script; returns the processes in rank order."""
        return [
            self.start(rank, script, *arguments, **environ) for rank in range(len(self.addresses))
        ]

    def end(self) -> list[str]:
        """Kill what is left, and name it and what shared memory is left."""
        left = [process.task for process in self._started if process.end()]
        return left + [str(path) for path in self.directory.glob("hostopt-*")]


NewRing = Callable[[int], RankProcesses]


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Fails a test that leaves a thread in this process."""
    threads = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(DEADLINE_S / 3)
        assert not thread.is_alive(), f"left by the test: {thread}"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[[int], RankProcesses]]:
    """`processes(size)`: a ring of processes, of which nothing may be left in the end."""
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
    """Programs as the processes of a cluster; what is left of them is killed."""
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.end()


@pytest.fixture
def signals_not_ignored() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and children would inherit that."""
    previous = {
        signum: signal.signal(signum, signal.SIG_DFL)
        for signum in FORWARDED
        if signal.getsignal(signum) is signal.SIG_IGN
    }
    yield
    for signum, handler in previous.items():
        signal.signal(signum, handler)


@pytest.fixture
def launcher(tmp_path: Path, signals_not_ignored: None) -> Iterator[Launcher]:
    """`hostopt run` as a process; nothing that has noted its pid may be left in the end."""
    notes = tmp_path / "notes"
    notes.mkdir()
    launcher = Launcher(notes)
    yield launcher
    noted = [int(path.suffix[1:]) for path in notes.iterdir()]
    for process in launcher.started:
        process.kill()
        process.wait()
    until(lambda: all(map(is_gone, noted)), "end of all children")
