"""`hostopt exec` on several hosts, each a network namespace with an address of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness import PROGRAMS, ROOT, deadline_s

sys.path.insert(0, str(ROOT))

from benchmarks.network import bridged

COMMAND = [sys.executable, "-m", "hostopt", "exec", "--", sys.executable]


def run(token: str | None) -> list[tuple[int, str, str]]:
    """Starts a rank on each of two hosts, and returns their codes and outputs."""
    with bridged(2) as namespaces:
        rendezvous = f"{next(iter(namespaces))}:20000"
        variables = {"HOSTOPT_SIZE": "2", "HOSTOPT_RENDEZVOUS": rendezvous}
        if token is not None:
            variables["HOSTOPT_TOKEN"] = token
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *COMMAND, str(PROGRAMS / "reduces_rank.py")],
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables, "HOSTOPT_RANK": str(i)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i, name in enumerate(namespaces.values())
        ]
        outputs = [each.communicate(timeout=deadline_s(60.0)) for each in started]
        return [(each.returncode, *output) for each, output in zip(started, outputs)]


def test_two_hosts_exchange_addresses_at_rank_0() -> None:
    results = run("of this test")
    assert [code for code, _, _ in results] == [0, 0], results
    reports = [json.loads(out) for _, out, _ in results]
    assert [each["ranks"] for each in reports] == [[0, 1], [0, 1]]
    cluster = reports[0]["tf_config"]["cluster"]
    assert reports[1]["tf_config"]["cluster"] == cluster
    hosts = {each[0].rpartition(":")[0] for each in (cluster["chief"], cluster["worker"])}
    assert len(hosts) == 2
    assert "127.0.0.1" not in hosts


def test_two_hosts_need_a_token() -> None:
    for code, _, errors in run(None):
        assert code == 78
        assert "HOSTOPT_TOKEN" in errors
