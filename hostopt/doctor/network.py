"""Checks of a cluster: addresses, this task's port, tokens and certificates, and the other ranks.

Ranks check each other if a doctor runs on all of them at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import glob
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hostopt.cluster.cluster import Cluster, Task
from hostopt.cluster.tf_config import DATA
from hostopt.collectives.communicator import Communicator, all_gather_json
from hostopt.connect import connect_ring
from hostopt.doctor.checking import Finding, note, ok, outcomes, wrong
from hostopt.doctor.machine import existing, installed, trial_file
from hostopt.errors import ConfigError, RendezvousTimeoutError
from hostopt.measure.clock import measure_offset
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.addresses import host_and_port, listen_address
from hostopt.transport.message import Tag
from hostopt.transport.security import Security

_RESOLVE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
_EXPIRES_SOON = timedelta(days=14)
_LISTENS = "0A"  # a state in /proc/net/tcp
_MUST_BE_SAME = ("hostopt", "tensorflow", "tf_keras")
_CLOCKS_DIFFER_S = 1.0
_MEASURE_S = 0.25
_MESSAGE_BYTES = 256 << 10
_SLOW_BYTES_PER_S = 100e6  # about what 1 Gbit/s carries


def task(cluster: Cluster) -> Iterator[Finding]:
    """Reports this task and its rank."""
    if cluster.task is None:
        yield note("TF_CONFIG names no cluster: a training here has one rank")
    elif cluster.rank is None:
        does = "prepares data" if cluster.role == DATA else "evaluates"
        yield ok(f"TF_CONFIG: {cluster.task} {does} for {cluster.size} ranks")
    else:
        yield ok(f"TF_CONFIG: {cluster.task} is rank {cluster.rank} of {cluster.size}")


def names(ring: Cluster) -> Iterator[Finding]:
    """Checks that the host of every task resolves."""
    host_of = {task.name: host_and_port(task.address)[0] for task in ring.ring}
    hosts = sorted(set(host_of.values()))
    results = outcomes(lambda host: socket.getaddrinfo(host, None), hosts, _RESOLVE_TIMEOUT_S)
    unknown = {
        host: result for host, result in zip(hosts, results) if isinstance(result, Exception)
    }
    for host, error in unknown.items():
        tasks = ", ".join(name for name, named in host_of.items() if named == host)
        yield wrong(
            f"the host {host!r} of {tasks} does not resolve ({error}): correct it in TF_CONFIG, "
            "or add it to DNS or /etc/hosts"
        )
    if not unknown:
        yield ok(f"names resolve: {', '.join(hosts)}")


def local_address(task: Task) -> Iterator[Finding]:
    """Checks that this task can listen at its address."""
    host, port = host_and_port(task.address)
    listen_host, _, _ = listen_address(task.address).rpartition(":")
    refused = _refusal(listen_host.strip("[]"), port)
    if refused is not None:
        in_use = refused.errno == errno.EADDRINUSE
        problem = "is in use" if in_use else f"cannot be bound ({refused})"
        yield wrong(
            f"port {port} of this task ({task}) {problem}{_listeners(port)}: stop that "
            "process, or choose another port in TF_CONFIG on all ranks"
        )
        return
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(info[4][0]) for info in infos})
    if all(_refusal(address, 0) is not None for address in addresses):
        yield note(
            f"{', '.join(addresses)}, the address of this task ({task}), does not belong to "
            "this machine: that is correct behind NAT, otherwise correct it in TF_CONFIG"
        )
    else:
        yield ok(f"port {port} of this task ({task}) is free")


def security(ring: Cluster, options: Options, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the token and the certificate of this rank."""
    credentials = Security(ring, options, environ)
    if credentials.has_token:
        yield ok("the ranks authenticate with a token")
    if credentials.tls is not None:
        if credentials.local_fault is not None:
            raise ConfigError(f"{credentials.local_fault}. Create a new one: see docs/security.md")
        expires = credentials.tls.expires
        text = f"the certificate of this rank is valid until {expires:%Y-%m-%d %H:%M} UTC"
        is_soon = expires - datetime.now(timezone.utc) < _EXPIRES_SOON
        yield (
            note(f"{text}: replace it before that, see docs/security.md") if is_soon else ok(text)
        )
    elif not credentials.has_token and options.insecure:
        yield note(
            "no token and no certificates: any process that reaches these addresses can join"
        )
    elif not credentials.has_token:
        yield ok("all addresses are loopback addresses, which need no token")


def calls(tasks: Sequence[Task]) -> Iterator[Finding]:
    """Checks whether missing tasks can be called; yields one finding for each."""

    def call(task: Task) -> None:
        socket.create_connection(host_and_port(task.address), _CONNECT_TIMEOUT_S).close()

    results = outcomes(call, tasks, 2 * _CONNECT_TIMEOUT_S)
    for task, error in zip(tasks, results):
        if error is None:
            yield note(f"{task}: the port is open, but no doctor of this ring answers")
        elif isinstance(error, ConnectionRefusedError):
            yield note(f"{task}: its machine answers, but nothing listens at the port yet")
        else:
            yield wrong(f"{task} cannot be reached ({error}): check firewalls and routes")


def _refusal(host: str, port: int) -> OSError | None:
    """Returns the error of binding an address, or None if a server can bind it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        try:
            server.bind((host, port))
        except OSError as error:
            return error
    return None


def _listeners(port: int) -> str:
    """Returns " by " and the processes that listen at a port, as far as this user can see."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            at_port = [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]
            inodes |= {f"socket:[{row[9]}]" for row in at_port if row[3] == _LISTENS}
    processes = []
    for fd in glob.glob("/proc/[0-9]*/fd/*") if inodes else ():
        with contextlib.suppress(OSError):  # of another user, or gone by now
            if os.readlink(fd) in inodes:
                pid = fd.split("/")[2]
                words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode(errors="replace").strip()
                processes.append(f"process {pid} ({command[:100]})")
    return " by " + ", ".join(sorted(set(processes))) if processes else ""


def other_ranks(
    ring: Cluster, options: Options, model_dir: str | None, timeout_s: float
) -> Iterator[Finding]:
    """Connects to the doctors of all other ranks like a training, with other deadlines."""
    options = replace(
        options,
        rendezvous_timeout_s=timeout_s,
        collective_timeout_s=timeout_s,
        timeline=None,
        debug_dir=None,
    )
    try:
        communicator = connect_ring(ring, options, service="hostopt.Doctor")
    except RendezvousTimeoutError as error:
        missing = error.root_cause or ""
        yield note(
            f"skipped the checks between ranks, {missing}: start `hostopt doctor` on all ranks at "
            "the same time"
        )
        yield from calls(
            [each for each in ring.ring if f"{each.name} ({each.address})" in missing]
        )
        return
    with communicator:
        yield ok(f"all {communicator.size} ranks are connected, with the same options")
        for check in (_memory, _versions, clocks, links):
            yield from check(communicator)
        yield from _shared_dir(communicator, model_dir)
        communicator.barrier("end of the doctors")


def _memory(communicator: Communicator) -> Iterator[Finding]:
    groups = communicator.hosts.groups if communicator.hosts else ()
    shared = [group for group in groups if len(group) > 1]
    if shared:
        text = "; ".join(", ".join(map(str, group)) for group in shared)
        yield ok(f"ranks that share memory: {text}")


def _versions(communicator: Communicator) -> Iterator[Finding]:
    tables = all_gather_json(communicator, installed(), "versions of the doctors")
    names = list(dict.fromkeys(name for table in tables for name in table))
    different = [name for name in names if len({table.get(name) for table in tables}) > 1]
    for name in different:
        text = ", ".join(f"rank {rank} {table.get(name)}" for rank, table in enumerate(tables))
        if name in _MUST_BE_SAME:
            yield wrong(f"{name} differs: {text}. Install the same version on all ranks")
        else:
            yield note(f"{name} differs: {text}")
    if not different:
        yield ok("all ranks have the same versions")


def clocks(communicator: Communicator, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Compares this rank's clock with rank 0's."""
    offset = measure_offset(communicator.duplicate("clocks of the doctors"), now)
    if communicator.rank == 0:
        return
    late_s = abs(offset.offset_s)
    if late_s - offset.round_trip_s > _CLOCKS_DIFFER_S:
        side = "behind" if offset.offset_s > 0 else "ahead of"
        yield wrong(
            f"this clock is {late_s:.1f} s {side} rank 0's: synchronise both with NTP. Times of "
            "files and certificates are compared with it"
        )
    else:
        most_s = late_s + offset.round_trip_s / 2
        yield ok(
            f"this clock agrees with rank 0's to within {most_s * 1e3:.2f} ms; a round trip "
            f"takes {offset.round_trip_s * 1e3:.2f} ms"
        )


def links(communicator: Communicator) -> Iterator[Finding]:
    """Measures the throughput from the previous rank while all ranks send."""
    sender = (communicator.rank - 1) % communicator.size
    communicator.barrier("links between the doctors")
    bytes_per_s = event_loop.run(_stream(communicator.duplicate(), sender))
    text = f"rank {sender} sends this rank {bytes_per_s / 1e6:.0f} MB/s"
    if bytes_per_s < _SLOW_BYTES_PER_S:
        step_s = 100e6 / bytes_per_s
        yield note(f"{text}: 100 MB of gradients take more than {step_s:.1f} s per step")
    else:
        yield ok(text)


async def _stream(communicator: Communicator, sender: int) -> float:
    """Sends to the next rank for `_MEASURE_S`; returns the bytes received per second."""
    transport, name = communicator.transport, "data of the doctor"
    first = Tag(communicator.channel, 0)

    async def send() -> None:
        receiver, end_s = (transport.rank + 1) % transport.size, time.monotonic() + _MEASURE_S
        payload, count = bytes(_MESSAGE_BYTES), 0
        while time.monotonic() < end_s:
            await transport.send(receiver, first._replace(step=count), payload, name)
            count += 1
        await transport.send(receiver, first._replace(step=count), b"", name)

    async def receive() -> float:
        begin_s, count = time.monotonic(), 0
        while await transport.recv(sender, first._replace(step=count), name):
            count += 1
        return count * _MESSAGE_BYTES / (time.monotonic() - begin_s)

    bytes_per_s, _ = await asyncio.gather(receive(), send())
    return bytes_per_s


def _shared_dir(communicator: Communicator, model_dir: str | None) -> Iterator[Finding]:
    """Checks that the other ranks see a file that rank 0 writes into its model_dir."""
    name, directory = "", existing(model_dir) if model_dir and "://" not in model_dir else None
    with contextlib.ExitStack() as stack:
        if communicator.rank == 0 and directory is not None:
            with contextlib.suppress(OSError):  # another check reports it
                name = stack.enter_context(trial_file(directory))
        name = all_gather_json(communicator, name, "name of a file in model_dir")[0]
        sees = None if directory is None else os.path.exists(os.path.join(directory, name))
        all_see = all_gather_json(communicator, sees, "ranks that see a file in model_dir")
    if communicator.rank != 0 or not name:
        return
    blind = [f"rank {rank}" for rank, sees in enumerate(all_see) if sees is False]
    if blind:
        yield note(
            f"model_dir is not shared: {', '.join(blind)} cannot see rank 0's. Only evaluators "
            "need to: rank 0 alone writes there"
        )
    elif None not in all_see:
        yield ok("model_dir is shared by all ranks")
