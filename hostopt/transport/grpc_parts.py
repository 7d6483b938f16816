"""The pieces of the gRPC transport that know nothing of the ring: options, threads, one stream."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import queue
import socket
import threading
import time
from concurrent import futures
from typing import Any, Callable

import grpc

from hostopt.options import Options

__all__: list[str] = []

GOODBYE_TIMEOUT_S = 2.0
# Last message of a stream that ends in good order; gRPC does not always tell it from a break.
END_OF_STREAM = b"end"
# Frames that wait to be written. gRPC writes them one by one; more would only take fresh memory,
# whose page faults cost as much as the copying.
_QUEUED_FRAMES = 4
_HEADROOM_BYTES = 64 << 10


def channel_options(options: Options) -> list[tuple[str, int]]:
    """gRPC arguments: no proxy, no shared ports, frozen peers found by ping, small limits.

    Args:
      options: `segment_bytes` bounds a message.

    Returns:
      Arguments for servers and channels.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 15_000),
        ("grpc.http2.ping_timeout_ms", 15_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.max_receive_message_length", options.segment_bytes + _HEADROOM_BYTES),
        ("grpc.max_send_message_length", options.segment_bytes + _HEADROOM_BYTES),
    ]


def listen_address(address: str) -> str:
    """Where to listen: loopback addresses on loopback only, others on every interface.

    Args:
      address: ``host:port`` as the cluster names it.

    Returns:
      One numeric address. With two (::1 and 127.0.0.1) a second process could take the other.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    family, *_, sockaddr = min(infos, key=lambda info: info[0] != socket.AF_INET)
    ip = str(sockaddr[0])
    # by what is written: some systems resolve their own host name to a loopback address
    literal = ip == host or (family == socket.AF_INET6 and ":" in host)
    if not (host == "localhost" or (literal and ipaddress.ip_address(ip).is_loopback)):
        ip = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def settle(call: grpc.Future, timeout_s: float) -> None:
    """Wait for a call to end, whatever its outcome.

    Args:
      call: call that was started as a future.
      timeout_s: how long to wait at most.
    """
    with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
        call.exception(timeout=max(timeout_s, 0))


class Stream:
    """Frames to one peer, written by gRPC's own thread from a short queue.

    Args:
      method: the Stream method of the peer.
      rank: this rank, which the peer is told once.
      options: `collective_timeout_s` is how long a full queue may stand still.
      on_end: called with the error that ended the stream, or None.
    """

    def __init__(
        self,
        method: Any,
        rank: int,
        options: Options,
        on_end: Callable[[grpc.RpcError | None], None],
    ) -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_QUEUED_FRAMES)
        self._timeout_s = options.collective_timeout_s
        self._ended = threading.Event()
        self._on_end = on_end
        self._call = method.future(iter(self._take, None), metadata=(("rank", str(rank)),))
        self._call.add_done_callback(self._done)

    @property
    def ended(self) -> bool:
        """True once nothing can be sent any more."""
        return self._ended.is_set()

    def put(self, message: bytes | None) -> bool:
        """Queue a frame.

        Args:
          message: a frame; None for the end of the stream.

        Returns:
          False where the stream has `ended`, or stood still until the deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._room.acquire(timeout=0.1):
            if self._ended.is_set() or time.monotonic() >= deadline:
                return False
        self._frames.put(message)
        return not self._ended.is_set()

    def _take(self) -> bytes | None:
        message = self._frames.get()
        self._room.release()
        return message

    def flush(self) -> None:
        """Say that no frame follows, and return once the peer has them all."""
        if self.put(END_OF_STREAM) and self.put(None):
            settle(self._call, self._timeout_s)

    def cancel(self) -> None:
        """Drop the stream and what is queued."""
        self._call.cancel()
        self._ended.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._frames.get_nowait()
        self._frames.put(None)  # the thread that reads the queue must not wait for ever

    def _done(self, call: grpc.Future) -> None:
        self._on_end(None if call.cancelled() else call.exception())  # before a sender sees it
        self._ended.set()


class DaemonThreads(futures.Executor):
    """A thread for each call, and spare ones that wait for the next calls.

    Streams last as long as the ring, and must not hold up the exit of the program: the threads
    are daemons. Python 3.12.0 and 3.12.1 start no thread once they have begun to exit, when the
    ranks say goodbye: then the spare threads do alone.
    """

    _SPARE = 2

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._spare = 0  # threads that wait for calls; below 0, calls that wait for threads
        self._add_to_spare(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Run `fn` in a daemon thread."""
        future: futures.Future[Any] = futures.Future()
        self._calls.put((future, functools.partial(fn, *args, **kwargs)))
        self._add_to_spare(-1)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Let the threads end when the calls have ended; waits for none of them."""
        del wait, cancel_futures
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)

    def _add_to_spare(self, count: int) -> None:
        with self._lock:
            self._spare += count
            while self._spare < self._SPARE:
                thread = threading.Thread(target=self._work, daemon=True, name="hostopt-grpc")
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is exiting
                    return
                self._threads += 1
                self._spare += 1

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, future, call  # what they hold must not outlive the call
            self._add_to_spare(1)
