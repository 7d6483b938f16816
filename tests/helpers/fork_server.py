"""Starts programs that need TensorFlow by forking a process that has imported it.

To import TensorFlow costs several seconds of processor time, more than most tests' trainings. The
server imports it once, starts no thread, session, operation or gRPC server, and forks a child for
each program. The child takes over the environment, directory and descriptors that the request
names, and runs the program as `__main__`: exit code, signals and the end of the interpreter are
those of any process.

What a forked program does not show: effects of variables that are read when TensorFlow is
imported, and another order of sets, as all programs share one hash seed. See `ranks.Ranks.start`.

The server reads requests from the socket on its standard input, one packet each: {"command":
[program, argument, ...], "environ": {...}, "cwd": ...}, with two descriptors, for the output and
for the status. It writes two lines to the latter: the process id, and later the exit code as in
`subprocess.Popen.returncode`. It ends when the socket is closed.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from harness import ROOT, deadline_s

_REQUEST_BYTES = 1 << 17


class ForkedProcess:
    """A program that the server has forked, with the methods of `subprocess.Popen` that tests use.

    Args:
      status: descriptor from which the server's two lines can be read.
    """

    def __init__(self, command: Sequence[str], status: int) -> None:
        self.args = list(command)
        self.returncode: int | None = None
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115  closed at its end
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """Returns the exit code; None while the program runs."""
        if self.returncode is None and _is_readable(self._status, 0):
            self._read_exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; the timeout is that of an idle machine."""
        if self.returncode is None:
            limit_s = None if timeout is None else deadline_s(timeout)
            if not _is_readable(self._status, limit_s):
                raise subprocess.TimeoutExpired(self.args, limit_s or 0.0)
            self._read_exit_code()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _read_exit_code(self) -> None:
        self.returncode = int(self._line())
        self._status.close()

    def _line(self) -> bytes:
        line = self._status.readline()
        assert line, "the fork server has died"
        return line


class ForkServer:
    """The server, seen from the tests."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__], stdin=remote, env=self.environ, cwd=ROOT
            )

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], output: BinaryIO
    ) -> ForkedProcess:
        """Runs a Python program, whose standard output and error go to a file."""
        request = {"command": list(command), "environ": dict(environ), "cwd": os.getcwd()}
        data = json.dumps(request).encode()
        assert len(data) <= _REQUEST_BYTES
        status, remote = os.pipe()
        try:
            socket.send_fds(self._socket, [data], [output.fileno(), remote])
        finally:
            os.close(remote)
        return ForkedProcess(command, status)

    def close(self) -> None:
        """Ends the server, which may still be importing; programs that it has started run on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


# --- in the server ----------------------------------------------------------------------------


def _serve() -> dict[str, Any]:
    """Serves requests until the tests close the socket; returns the request in a child."""
    before = dict(os.environ)
    import tensorflow  # noqa: F401

    import estimator_ext  # noqa: F401

    imported = {k: v for k, v in os.environ.items() if before.get(k) != v}
    gc.freeze()  # so that no child looks for garbage among all that is imported
    requests = socket.socket(fileno=os.dup(0))
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                _report_end(selector, key)
                continue
            data, (output, status) = _receive(requests)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                for other in selector.get_map().values():
                    os.close(other.fd)
                    if other.data:
                        os.close(other.data[1])
                os.close(status)
                selector.close()
                requests.detach()
                return _take_over({**json.loads(data), "imported": imported}, output)
            os.close(output)
            os.write(status, b"%d\n" % pid)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def _receive(requests: socket.socket) -> tuple[bytes, tuple[int, int]]:
    """A request and its descriptors; no data once the tests have closed the socket."""
    data, ancillary, _, _ = requests.recvmsg(_REQUEST_BYTES, socket.CMSG_SPACE(8))
    descriptors = array.array("i")
    for _, _, part in ancillary:
        descriptors.frombytes(part)
    output, status = descriptors or (-1, -1)
    return data, (output, status)


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()  # unlike select.select, it takes descriptors above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _report_end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, status = key.data
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    selector.unregister(key.fileobj)
    os.close(key.fd)
    with contextlib.suppress(BrokenPipeError):  # the test has ended without waiting
        os.write(status, b"%d\n" % code)
    os.close(status)


def _take_over(request: dict[str, Any], output: int) -> dict[str, Any]:
    """Makes this process, just forked, look like one that was started by the request."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update({**request["imported"], **request["environ"]})
    os.chdir(request["cwd"])
    if "coverage" in sys.modules:  # tests/release/mutants.py asks which test runs a line
        test = os.environ.get("PYTEST_CURRENT_TEST", "none")
        sys.modules["coverage"].Coverage.current().switch_context(test)
    return request


if __name__ == "__main__":
    sys.argv = _serve()["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
