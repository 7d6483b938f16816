"""Metrics of a run for Prometheus, which the launcher serves on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hostopt.errors import ConfigError
from hostopt.launch.monitor import Monitor, Progress
from hostopt.process import descriptors

_LOG = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """One metric of a run."""

    name: str  # without the prefix ``hostopt_``; the name of a counter ends in ``_total``
    meaning: str
    label: str  # its name; "" for none
    values: Mapping[str, float]


@contextlib.contextmanager
def served(monitor: Monitor, port: int) -> Iterator[int]:
    """Scope in which the metrics of a run can be read over HTTP, at the port that it yields."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise ConfigError(
            "--metrics-port needs prometheus-client: pip install 'hostopt[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(_Collector(monitor))
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as error:
        descriptors.check(error)
        raise ConfigError(
            f"port {port} of {_HOST} cannot be used for metrics: {os.strerror(error.errno or 0)}. "
            "Choose another --metrics-port, or 0 for any free one"
        ) from error
    port = listener.getsockname()[1]
    with answering(listener, lambda: bytes(generate_latest(registry))):
        _LOG.info("metrics: http://%s:%d/metrics", _HOST, port)
        yield port


class _Collector:
    """Reads the progress of a run whenever its metrics are read."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Any]:
        """Yields the metrics in the types of prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for each in metrics_of(*self._monitor.read(), self._monitor.restarts):
            kind = CounterMetricFamily if each.name.endswith("_total") else GaugeMetricFamily
            labels = [each.label] if each.label else []
            family = kind(f"hostopt_{each.name}", each.meaning, labels=labels)
            for label, value in each.values.items():
                family.add_metric([label] if each.label else [], value)
            yield family


def metrics_of(
    attempts: Mapping[int, Progress], evaluation: Progress, restarts: int
) -> Iterator[Metric]:
    """Yields the metrics of a run."""
    yield Metric("restarts_total", "restarts of the ranks", "", {"": restarts})
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # another hostopt
        if attempts:
            yield from _of_training(attempts[max(attempts)])
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if evaluation:
            value = {str(evaluation["metric"]): float(evaluation["value"])}
            yield Metric("evaluation", "main metric of the newest evaluation", "metric", value)
            step = {"": float(evaluation["step"])}
            yield Metric("evaluation_step", "global_step of the newest evaluation", "", step)


_SCALARS = {  # name and meaning by key of the progress
    "step": ("step", "global_step"),
    "last_step": ("last_step", "global_step at which the training stops"),
    "loss": ("loss", "loss of the newest step that was measured"),
    "examples_per_s": ("examples_per_second", "examples of all ranks in the last 10 seconds"),
    "checkpoint_step": ("checkpoint_step", "global_step of the newest checkpoint"),
    "checkpoint_time_s": (
        "checkpoint_timestamp_seconds",
        "time at which the newest checkpoint was complete, in Unix time",
    ),
    "sent_bytes": ("sent_bytes_total", "payload of the messages of the chief in this attempt"),
}


def _of_training(training: Progress) -> Iterator[Metric]:
    for key, (name, meaning) in _SCALARS.items():
        if training.get(key) is not None:
            yield Metric(name, meaning, "", {"": training[key]})
    if training.get("steps_per_s"):
        seconds = {"": 1.0 / training["steps_per_s"]}
        yield Metric("step_seconds", "mean time of a step in the last 10 seconds", "", seconds)
    parts = {part: ms / 1e3 for part, ms in training.get("times_ms", {}).items()}
    if parts:
        yield Metric("step_part_seconds", "mean time of a part of a step", "part", parts)
    if "communication_ms" in training:
        meaning = "mean time of the reductions of a step"
        seconds = {"": training["communication_ms"] / 1e3}
        yield Metric("communication_seconds", meaning, "", seconds)
        exposed = {"": parts["exposed_communication"]}
        yield Metric("exposed_communication_seconds", f"{meaning} after backward", "", exposed)
    waits = {str(rank): float(each) for rank, each in enumerate(training.get("waited_s", ()))}
    if waits:
        meaning = "time that a rank has waited for reductions in this attempt"
        yield Metric("wait_seconds_total", meaning, "rank", waits)


MOST_CONNECTIONS = 16
CONNECTION_S = 5.0  # from the connection to the end of the answer
REQUEST_BYTES = 8 << 10
_BACKLOG = 8  # connections that are accepted at once


@contextlib.contextmanager
def answering(listener: socket.socket, answer: Callable[[], bytes]) -> Iterator[None]:
    """Scope in which a thread answers each GET request; closes the bound `listener` at its end."""
    callers: list[asyncio.StreamWriter] = []  # the oldest first

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(writer)
        for oldest in callers[:-MOST_CONNECTIONS]:
            oldest.transport.abort()
        try:
            await asyncio.wait_for(_answer(reader, writer, answer), CONNECTION_S)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # the caller has left, or takes too much
        finally:
            callers.remove(writer)
            writer.transport.abort()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(serve, sock=listener, limit=REQUEST_BYTES, backlog=_BACKLOG)
    )
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="hostopt-metrics")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_end_all())
        loop.close()


async def _end_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Callable[[], bytes]
) -> None:
    request = await reader.readuntil(b"\r\n\r\n")
    status, body = "405 Method Not Allowed", b""
    if request.startswith(b"GET "):
        status, body = "200 OK", answer()
    head = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {_CONTENT_TYPE}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    writer.write("".join(f"{line}\r\n" for line in (*head, "")).encode() + body)
    writer.close()
    await writer.wait_closed()
