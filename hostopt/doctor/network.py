"""Checks of the cluster's addresses, of this task's port, and of tokens and certificates."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hostopt.cluster.cluster import Cluster, Task
from hostopt.cluster.tf_config import DATA
from hostopt.doctor.checking import NOTE, OK, WRONG, Finding, outcomes
from hostopt.options import Options
from hostopt.transport.addresses import host_and_port, listen_address
from hostopt.transport.security import Security, check_tls_dir

_RESOLVE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
_EXPIRES_SOON = timedelta(days=14)
_LISTENS = "0A"  # a state in /proc/net/tcp


def task(cluster: Cluster) -> Iterator[Finding]:
    """Reports this task and its rank."""
    if cluster.task is None:
        yield Finding(NOTE, "TF_CONFIG names no cluster: a training here has one rank")
    elif cluster.rank is None:
        does = "prepares data" if cluster.role == DATA else "evaluates"
        yield Finding(OK, f"TF_CONFIG: {cluster.task} {does} for {cluster.size} ranks")
    else:
        yield Finding(OK, f"TF_CONFIG: {cluster.task} is rank {cluster.rank} of {cluster.size}")


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
        yield Finding(
            WRONG,
            f"the host {host!r} of {tasks} does not resolve ({error}): correct it in TF_CONFIG, "
            "or add it to DNS or /etc/hosts",
        )
    if not unknown:
        yield Finding(OK, f"names resolve: {', '.join(hosts)}")


def local_address(task: Task) -> Iterator[Finding]:
    """Checks that this task can listen at its address."""
    host, port = host_and_port(task.address)
    listen_host, _, _ = listen_address(task.address).rpartition(":")
    refused = _refusal(listen_host.strip("[]"), port)
    if refused is not None:
        in_use = refused.errno == errno.EADDRINUSE
        problem = "is in use" if in_use else f"cannot be bound ({refused})"
        yield Finding(
            WRONG,
            f"port {port} of this task ({task}) {problem}{_listeners(port)}: stop that "
            "process, or choose another port in TF_CONFIG on all ranks",
        )
        return
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(info[4][0]) for info in infos})
    if all(_refusal(address, 0) is not None for address in addresses):
        yield Finding(
            NOTE,
            f"{', '.join(addresses)}, the address of this task ({task}), does not belong to "
            "this machine: that is correct behind NAT, otherwise correct it in TF_CONFIG",
        )
    else:
        yield Finding(OK, f"port {port} of this task ({task}) is free")


def security(ring: Cluster, options: Options, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the token and the certificate of this rank."""
    credentials = Security(ring, options, environ)
    if credentials.has_token:
        yield Finding(OK, "the ranks authenticate with a token")
    if options.tls_dir is not None and ring.task is not None:
        expires = check_tls_dir(options.tls_dir, host_and_port(ring.task.address)[0])
        text = f"the certificate of this rank is valid until {expires:%Y-%m-%d %H:%M} UTC"
        if expires - datetime.now(timezone.utc) < _EXPIRES_SOON:
            yield Finding(NOTE, f"{text}: replace it before that, see docs/security.md")
        else:
            yield Finding(OK, text)
    elif not credentials.has_token and options.insecure:
        text = "no token and no certificates: any process that reaches these addresses can join"
        yield Finding(NOTE, text)
    elif not credentials.has_token:
        yield Finding(OK, "all addresses are loopback addresses, which need no token")


def calls(tasks: Sequence[Task]) -> Iterator[Finding]:
    """Checks whether missing tasks can be called; yields one finding for each."""
    results = outcomes(_call, tasks, 2 * _CONNECT_TIMEOUT_S)
    for task, error in zip(tasks, results):
        if error is None:
            yield Finding(NOTE, f"{task}: the port is open, but no doctor of this ring answers")
        elif isinstance(error, ConnectionRefusedError):
            yield Finding(
                NOTE, f"{task}: its machine answers, but nothing listens at the port yet"
            )
        else:
            yield Finding(WRONG, f"{task} cannot be reached ({error}): check firewalls and routes")


def _call(task: Task) -> None:
    socket.create_connection(host_and_port(task.address), _CONNECT_TIMEOUT_S).close()


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
