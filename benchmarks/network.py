"""Several "hosts" on one machine: network namespaces connected by a link or a switch."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import common
from hostopt.launch.environment import shares_of_cores, tf_config_of, with_defaults

ADDRESSES = ("10.213.77.1", "10.213.77.2")
INTERFACE = "wire0"  # name in both namespaces
SECOND_INTERFACE = "wire1"  # the same, of a second line
_SECOND_ADDRESSES = ("10.213.79.1", "10.213.79.2")
_PORT = 2222
_PREFIX = "hostopt-net"
_INSECURE = {"HOSTOPT_INSECURE": "true"}  # no other process can reach these links


@dataclass(frozen=True)
class Link:
    """Two connected namespaces.

    Args:
      namespaces: names of the namespaces.
    """

    namespaces: tuple[str, str]

    def run(
        self, command: Sequence[object], timeout_s: float, environ: dict[str, str] | None = None
    ) -> str:
        """Runs one rank in each namespace, each with its own TF_CONFIG.

        Args:
          command: program and arguments of both.
          timeout_s: seconds after which both are ended.
          environ: environment variables added to the environment of this process.

        Returns:
          The output of both.

        Raises:
          BenchmarkError: a rank failed or took too long.
        """
        return run(dict(zip(ADDRESSES, self.namespaces)), command, timeout_s, environ)

    def set_rate(self, rate_bit_per_s: float, burst: str = "256kb") -> None:
        """Limits both directions.

        Args:
          rate_bit_per_s: bits per second of Ethernet frames.
          burst: maximum amount sent at once after a pause.
        """
        for namespace in self.namespaces:
            limit_rate(namespace, rate_bit_per_s, burst)


def run(
    namespaces: Mapping[str, str],
    command: Sequence[object],
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Runs one rank in each namespace, each with its own TF_CONFIG and its share of the cores.

    Args:
      namespaces: namespaces by address.
      command: program and arguments of all ranks.
      timeout_s: seconds after which all are ended.
      environ: environment variables added to the environment of this process.

    Returns:
      The output of all ranks.

    Raises:
      BenchmarkError: a rank failed or took too long.
    """
    size = len(namespaces)
    cluster = {"worker": [f"{address}:{_PORT}" for address in namespaces]}
    # without no_proxy, gRPC and others may send local addresses to a proxy
    base = {"no_proxy": "*", **_INSECURE, **(environ or {})}
    programs = []
    for index, (namespace, share) in enumerate(zip(namespaces.values(), shares_of_cores(size))):
        cores = ",".join(map(str, share))
        bound = ["ip", "netns", "exec", namespace, "taskset", "-c", cores, *command]
        settings = {**base, "TF_CONFIG": tf_config_of(cluster, ("worker", index))}
        programs.append((bound, with_defaults(settings, "worker", size)))
    return common.run_together(programs, timeout_s)


def limit_rate(namespace: str, rate_bit_per_s: float, burst: str = "256kb") -> None:
    """Limits the rate at which a namespace sends.

    Args:
      namespace: name of the namespace.
      rate_bit_per_s: bits per second of Ethernet frames.
      burst: maximum amount sent at once after a pause.
    """
    do(f"tc -n {namespace} qdisc replace dev {INTERFACE} root {_shape(rate_bit_per_s, burst)}")


def limit_own_rate(rate_bit_per_s: float | None) -> None:
    """Limits the rate at which the namespace of this process sends.

    Args:
      rate_bit_per_s: bits per second of Ethernet frames; None removes the limit.
    """
    limit = "del" if rate_bit_per_s is None else "replace"
    shape = "" if rate_bit_per_s is None else _shape(rate_bit_per_s)
    do(f"tc qdisc {limit} dev {INTERFACE} root {shape}")


def _shape(rate_bit_per_s: float, burst: str = "256kb") -> str:
    return f"tbf rate {rate_bit_per_s:.0f}bit burst {burst} latency 50ms"


@contextlib.contextmanager
def joined(mtu: int = 1500, lines: int = 1) -> Iterator[Link]:
    """Creates two connected namespaces without a rate limit, and removes them at the end.

    Args:
      mtu: size of the largest packet of the link, in bytes.
      lines: 1, or 2 for another line between them, with its own network.

    Yields:
      The link.

    Raises:
      BenchmarkError: not root, or `ip` or `tc` is missing or fails.
    """
    with _namespaces(2) as (first, second):
        networks = {INTERFACE: ADDRESSES, SECOND_INTERFACE: _SECOND_ADDRESSES}
        for interface, addresses in list(networks.items())[:lines]:
            ends = f"{interface} netns {first} type veth peer name {interface} netns {second}"
            do(f"ip link add {ends}")
            for name, address in zip((first, second), addresses):
                _connect(name, f"{address}/30", mtu, interface)
        yield Link((first, second))


@contextlib.contextmanager
def bridged(count: int) -> Iterator[dict[str, str]]:
    """Creates namespaces connected by a switch, and removes them at the end.

    Args:
      count: number of namespaces.

    Yields:
      Namespaces by address.

    Raises:
      BenchmarkError: not root, or `ip` or `tc` is missing or fails.
    """
    with _namespaces(count + 1) as (switch, *names):
        do(f"ip -n {switch} link add bridge0 type bridge")
        do(f"ip -n {switch} link set bridge0 up")
        addresses = [f"10.213.78.{index + 1}" for index in range(count)]
        for index, (name, address) in enumerate(zip(names, addresses)):
            port = f"port{index}"
            do(f"ip link add {INTERFACE} netns {name} type veth peer name {port} netns {switch}")
            do(f"ip -n {switch} link set {port} master bridge0 up")
            _connect(name, f"{address}/24")
        yield dict(zip(addresses, names))


@contextlib.contextmanager
def _namespaces(count: int) -> Iterator[list[str]]:
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise BenchmarkError(f"no {' and no '.join(missing)} here: apt-get install iproute2")
    if os.geteuid() != 0:
        raise BenchmarkError("network namespaces need root: run this with sudo")
    _remove_left_behind()
    names = [f"{_PREFIX}-{os.getpid()}-{index}" for index in range(count)]
    try:
        for name in names:
            do(f"ip netns add {name}")
            do(f"ip -n {name} link set lo up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(BenchmarkError):
                do(f"ip netns del {name}")


def _connect(namespace: str, address: str, mtu: int = 1500, interface: str = INTERFACE) -> None:
    do(f"ip -n {namespace} addr add {address} dev {interface}")
    do(f"ip -n {namespace} link set {interface} mtu {mtu} up")


def sent_bytes() -> int:
    """Returns the bytes that this namespace has sent over the link, from the interface counter."""
    with open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes") as counter:
        return int(counter.read())


BenchmarkError = common.BenchmarkError


def _remove_left_behind() -> None:
    """Removes namespaces of benchmarks that were killed."""
    for name in re.findall(rf"^{_PREFIX}-\d+-\d+", do("ip netns list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{name.split('-')[2]}"):
            do(f"ip netns del {name}")


def do(command: str) -> str:
    """Runs a command of `ip` or `tc` and returns its output; raises BenchmarkError if it fails."""
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise BenchmarkError(f"{command}: {done.stderr.strip()}")
    return done.stdout
