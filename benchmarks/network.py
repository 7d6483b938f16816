"""Two "hosts" on one machine: network namespaces, joined by a link of chosen speed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import common

ADDRESSES = ("10.213.77.1", "10.213.77.2")
INTERFACE = "wire0"  # its name in both namespaces
_PORT = 2222
_PREFIX = "hostopt-bench"


@dataclass(frozen=True)
class Link:
    """Two namespaces that are joined.

    Args:
      namespaces: their names.
    """

    namespaces: tuple[str, str]

    def run(
        self, command: Sequence[object], timeout_s: float, environ: dict[str, str] | None = None
    ) -> str:
        """Run one rank in each namespace, with a TF_CONFIG of its own.

        Args:
          command: program and arguments of both.
          timeout_s: seconds after which both are ended.
          environ: variables beside those of this process.

        Returns:
          What they printed.

        Raises:
          BenchmarkError: one failed, or took too long.
        """
        workers = [f"{address}:{_PORT}" for address in ADDRESSES]
        programs = []
        for index, namespace in enumerate(self.namespaces):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": {"worker": workers}, "task": task})
            # GRPC and others would send local addresses to a proxy
            own = {"TF_CONFIG": config, "no_proxy": "*", **(environ or {})}
            programs.append((["ip", "netns", "exec", namespace, *command], own))
        return common.run_together(programs, timeout_s)

    def set_rate(self, rate_bit_per_s: float, burst: str = "256kb") -> None:
        """Limit both directions.

        Args:
          rate_bit_per_s: bits a second, of frames as Ethernet counts them.
          burst: how much may pass at once after a pause.
        """
        for namespace in self.namespaces:
            shape = f"tbf rate {rate_bit_per_s:.0f}bit burst {burst} latency 50ms"
            _do(f"tc -n {namespace} qdisc replace dev {INTERFACE} root {shape}")


@contextlib.contextmanager
def joined(mtu: int = 1500) -> Iterator[Link]:
    """Make two joined namespaces, of no limited rate, and remove them in the end.

    Args:
      mtu: largest packet of the link, bytes.

    Yields:
      The link.

    Raises:
      BenchmarkError: not root, or no `ip` or `tc`, or they fail.
    """
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise BenchmarkError(f"no {' and no '.join(missing)} here: apt-get install iproute2")
    if os.geteuid() != 0:
        raise BenchmarkError("network namespaces need root: run this with sudo")
    _remove_left_behind()
    first, second = names = (f"{_PREFIX}-{os.getpid()}-0", f"{_PREFIX}-{os.getpid()}-1")
    try:
        for name in names:
            _do(f"ip netns add {name}")
        ends = f"{INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}"
        _do(f"ip link add {ends}")
        for name, address in zip(names, ADDRESSES):
            _do(f"ip -n {name} addr add {address}/30 dev {INTERFACE}")
            _do(f"ip -n {name} link set {INTERFACE} mtu {mtu} up")
            _do(f"ip -n {name} link set lo up")
        yield Link(names)
    finally:
        for name in names:
            with contextlib.suppress(BenchmarkError):
                _do(f"ip netns del {name}")


def sent_bytes() -> int:
    """Bytes that this namespace has sent over the link, by the counter of the interface."""
    with open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes") as counter:
        return int(counter.read())


BenchmarkError = common.BenchmarkError


def _remove_left_behind() -> None:
    """Remove namespaces of benchmarks that were killed."""
    for name in re.findall(rf"^{_PREFIX}-\d+-\d", _do("ip netns list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{name.split('-')[2]}"):
            _do(f"ip netns del {name}")


def _do(command: str) -> str:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise BenchmarkError(f"{command}: {done.stderr.strip()}")
    return done.stdout
