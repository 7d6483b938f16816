"""Data workers: which elements the ranks get, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
from harness import QUIET, ROOT, Process, python
from served import PROGRAM, Served

import estimator_ext

sys.path.insert(0, str(ROOT))

from benchmarks.network import bridged

estimator_ext.install()


# -- confinement ---------------------------------------------------------------------------


SERVER = """
    import socket, time
    import tensorflow as tf
    from hostopt.transport.server_sockets import confine
    server = tf.data.experimental.service.DispatchServer()
    port = int(server.target.rpartition(":")[2])
    print(port, flush=True)
    input()
    confine(port)
    socket.create_connection(("127.0.0.1", port), 10).close()
    print("confined", flush=True)
    while True:
        confine(port)
        time.sleep(0.1)
"""
CLIENT = """
    import socket, sys
    address = sys.argv[1], int(sys.argv[2])
    connection = socket.create_connection(address, 10)
    connection.settimeout(None)
    print("connected", flush=True)
    while connection.recv(4096):
        pass
    try:
        socket.create_connection(address, 10)
    except ConnectionRefusedError:
        print("refused", flush=True)
"""


def test_another_machine_reaches_no_confined_server() -> None:
    with bridged(2) as namespaces, contextlib.ExitStack() as stack:
        (address, here), (_, there) = namespaces.items()

        def start(namespace: str, code: str, *arguments: str) -> Process:
            process = Process(
                ["ip", "netns", "exec", namespace, *python(code), *arguments],
                env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        server = start(here, SERVER)
        client = start(there, CLIENT, address, server.stdout.readline().strip())
        assert client.stdout.readline() == "connected\n"
        server.stdin.write("\n")
        assert server.stdout.readline() == "confined\n"
        out, _ = client.communicate(timeout=30)
        assert out == "refused\n"


@pytest.mark.parametrize("insecure", [False, True])
def test_data_workers_between_hosts_need_insecure(served: Served, insecure: bool) -> None:
    secret = {"HOSTOPT_INSECURE": "1"} if insecure else {"HOSTOPT_TOKEN": "of this test"}
    with bridged(2) as namespaces, contextlib.ExitStack() as stack:
        jobs = {
            job: [f"{ip}:{port}" for ip in namespaces]
            for job, port in (("worker", 2001), ("data", 2002))
        }
        processes = []
        for job in jobs:
            for index, name in enumerate(namespaces.values()):
                config = {"cluster": jobs, "task": {"type": job, "index": index}}
                settings = served.arguments(count=100, gone_s=10.0)
                process = Process(
                    ["ip", "netns", "exec", name, sys.executable, PROGRAM, settings],
                    env={**os.environ, **QUIET, **secret, "TF_CONFIG": json.dumps(config)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
        for process in processes:
            out, _ = process.communicate(timeout=100)
            assert process.returncode == (0 if insecure else 78), out
            assert insecure or "knows neither token nor TLS" in out
    expected = list(range(1, 101)) if insecure else []
    assert served.elements(["worker-0", "worker-1"]) == expected
