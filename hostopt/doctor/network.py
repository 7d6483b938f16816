"""Where the tasks of the cluster are, and whether this one can listen and call."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hostopt.cluster import Cluster, Task
from hostopt.doctor.checking import NOTE, OK, WRONG, Finding, outcomes
from hostopt.options import Options
from hostopt.transport.addresses import host_and_port, listen_address
from hostopt.transport.security import Security, check_tls_dir

__all__: list[str] = []

_RESOLVE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
_EXPIRES_SOON = timedelta(days=14)
_LISTENS = "0A"  # a state in /proc/net/tcp


def task(cluster: Cluster) -> Iterator[Finding]:
    """This task's place in the cluster."""
    if cluster.task is None:
        yield Finding(NOTE, "TF_CONFIG names no cluster: a training here has one rank")
    elif cluster.rank is None:
        yield Finding(OK, f"TF_CONFIG: {cluster.task} evaluates for {cluster.size} ranks")
    else:
        yield Finding(OK, f"TF_CONFIG: {cluster.task} is rank {cluster.rank} of {cluster.size}")


def names(ring: Cluster) -> Iterator[Finding]:
    """Whether the host of every task resolves."""
    host_of = {task.name: host_and_port(task.address)[0] for task in ring.ring}
    hosts = sorted(set(host_of.values()))
    found = outcomes(lambda host: socket.getaddrinfo(host, None), hosts, _RESOLVE_TIMEOUT_S)
    unknown = {host: result for host, result in zip(hosts, found) if isinstance(result, Exception)}
    for host, error in unknown.items():
        tasks = ", ".join(name for name, named in host_of.items() if named == host)
        yield Finding(
            WRONG,
            f"the host {host!r} of {tasks} does not resolve ({error}): correct it in TF_CONFIG, "
            "or let DNS or /etc/hosts know it",
        )
    if not unknown:
        yield Finding(OK, f"names resolve: {', '.join(hosts)}")


def own_address(task: Task) -> Iterator[Finding]:
    """Whether this task can listen where the others call it."""
    host, port = host_and_port(task.address)
    listen_host, _, _ = listen_address(task.address).rpartition(":")
    refused = _refusal(listen_host.strip("[]"), port)
    if refused is not None:
        what = "is in use" if refused.errno == errno.EADDRINUSE else f"cannot be had ({refused})"
        yield Finding(
            WRONG,
            f"port {port} of this task ({task}) {what}{_listeners(port)}: end what listens there, "
            "or choose another port in TF_CONFIG on all ranks",
        )
        return
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(info[4][0]) for info in infos})
    if all(_refusal(address, 0) is not None for address in addresses):
        yield Finding(
            NOTE,
            f"{', '.join(addresses)}, the address of this task ({task}), is not one of this "
            "machine: right behind NAT or a service that forwards, else correct it in TF_CONFIG",
        )
    else:
        yield Finding(OK, f"port {port} of this task ({task}) is free")


def security(ring: Cluster, options: Options, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the ranks have what they need to make sure of each other."""
    found = Security(ring, options, environ)
    if found.has_token:
        yield Finding(OK, "the ranks prove to know a token")
    if options.tls_dir is not None and ring.task is not None:
        expires = check_tls_dir(options.tls_dir, host_and_port(ring.task.address)[0])
        text = f"the certificate of this rank holds until {expires:%Y-%m-%d %H:%M} UTC"
        if expires - datetime.now(timezone.utc) < _EXPIRES_SOON:
            yield Finding(NOTE, f"{text}: make a new one before, see SECURITY.md")
        else:
            yield Finding(OK, text)
    elif not found.has_token and options.insecure:
        text = "no token and no certificates: whoever reaches these addresses may take part"
        yield Finding(NOTE, text)
    elif not found.has_token:
        yield Finding(OK, "all addresses are loopback ones, which need no token")


def calls(tasks: Sequence[Task]) -> Iterator[Finding]:
    """Whether other tasks can be called that have not come; one finding each."""
    results = outcomes(_call, tasks, 2 * _CONNECT_TIMEOUT_S)
    for task, error in zip(tasks, results):
        if error is None:
            yield Finding(NOTE, f"{task}: something listens there, and is no doctor of this ring")
        elif isinstance(error, ConnectionRefusedError):
            yield Finding(NOTE, f"{task}: its machine answers, and nobody listens there (yet)")
        else:
            yield Finding(
                WRONG,
                f"{task} cannot be reached ({error}): look for a firewall or the route",
            )


def _call(task: Task) -> None:
    socket.create_connection(host_and_port(task.address), _CONNECT_TIMEOUT_S).close()


def _refusal(host: str, port: int) -> OSError | None:
    """Why a server cannot have an address; None where it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        try:
            server.bind((host, port))
        except OSError as error:
            return error
    return None


def _listeners(port: int) -> str:
    """Who listens at a port, as far as this user may know."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            at_port = [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]
            inodes |= {f"socket:[{row[9]}]" for row in at_port if row[3] == _LISTENS}
    found = []
    for fd in glob.glob("/proc/[0-9]*/fd/*") if inodes else ():
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if os.readlink(fd) in inodes:
                pid = fd.split("/")[2]
                words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode(errors="replace").strip()
                found.append(f"process {pid} ({command[:100]})")
    return " by " + ", ".join(sorted(set(found))) if found else ""
