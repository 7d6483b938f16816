"""Ranks that join: neutral values, order, the rank that joins last, and errors."""

from __future__ import annotations

from rings import NewRing

SCRIPT = """
import sys
import hostopt
from hostopt.by_name.named import NamedCollectives

communicator = hostopt.connect()
named = NamedCollectives(communicator)
named.barrier("begin")
print("ready", flush=True)
try:
    if named.rank == 0:
        sys.stdin.read()
    elif named.rank == 1:
        named.joining.join()
    else:
        named.barrier("x")
except hostopt.HostOptError as error:
    print(type(error).__name__, error.rank, flush=True)
"""


def test_a_rank_dies_after_another_has_joined(processes: NewRing) -> None:
    dying, *others = processes(3).start_all(SCRIPT)
    for each in (dying, *others):
        each.expect("ready")
    dying.kill()
    for each in others:
        each.expect("PeerLostError 0")
        each.exit_code()
