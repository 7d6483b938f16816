"""Validation of TF_CONFIG and of the jobs and task of a cluster."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Mapping
from typing import Any

from hostopt.errors import ConfigError
from hostopt.options import shown

CHIEF, WORKER, EVALUATOR, DATA = "chief", "worker", "evaluator", "data"
MASTER = "master"  # name of the chief in old programs
RING_JOBS = (CHIEF, MASTER, WORKER)  # in rank order
_MAX_PORT_DIGITS = 5
_VARIABLE = "TF_CONFIG"
_EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def read_tf_config(environ: Mapping[str, str]) -> tuple[Any, str, Any] | None:
    """Returns jobs, task type and index of TF_CONFIG, not yet validated; None without jobs."""
    hidden = _hidden if environ is os.environ else {}
    config = _parse(environ.get(_VARIABLE, hidden.get(_VARIABLE, "")).strip())
    task = config.get("task", {})
    if config.get("cluster", {}) == {}:
        if task not in ({}, {"type": WORKER, "index": 0}):
            raise ConfigError(
                f'TF_CONFIG has "task" {shown(task)} but no "cluster". Add the key "cluster" '
                f"with the addresses of all ranks, for example {_EXAMPLE}"
            )
        return None
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ConfigError(
            f'TF_CONFIG key "task" is {shown(config.get("task"))}, wanted an object with "type" '
            'and "index". If "cluster" is set in TF_CONFIG, task type and task index must be '
            f"set. Write for example {_EXAMPLE}"
        )
    return config["cluster"], task["type"], task["index"]


_hidden: dict[str, str] = {}  # what `hide` has removed


def hide() -> None:
    """Hides TF_CONFIG from TensorFlow and from processes that this one starts.

    `read_tf_config` still finds it, unless the program sets another.
    """
    if _VARIABLE in os.environ:
        _hidden[_VARIABLE] = os.environ.pop(_VARIABLE)


def show() -> None:
    """Makes a hidden TF_CONFIG visible again."""
    for name, value in _hidden.items():
        os.environ.setdefault(name, value)
    _hidden.clear()


os.register_at_fork(after_in_child=_hidden.clear)


def _parse(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"TF_CONFIG is not JSON ({error}): {shown(text)}. Write for example {_EXAMPLE}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"TF_CONFIG is {shown(text)}, wanted a JSON object. Write for example {_EXAMPLE}"
        )
    return config


def check_jobs(jobs: Any) -> dict[str, list[str]]:
    """Validates the jobs of a cluster."""
    if not isinstance(jobs, Mapping):
        raise ConfigError(
            f'TF_CONFIG key "cluster" is {shown(jobs)}, wanted an object. Write for example '
            f"{_EXAMPLE}"
        )
    checked: dict[str, list[str]] = {}
    for job, addresses in jobs.items():
        if job == "ps":
            raise ConfigError(
                'TF_CONFIG key "cluster" has a "ps" job, but hostopt has no parameter servers: '
                'each rank holds the variables. Remove "ps" and start only chief and workers'
            )
        if job not in (*RING_JOBS, EVALUATOR, DATA):
            raise ConfigError(
                f'TF_CONFIG key "cluster" has the unknown job {shown(job)}. Use "chief" (one), '
                '"worker", "evaluator" and "data"'
            )
        checked[job] = _check_addresses(job, addresses)
    _check_one_chief(checked)
    ring = [address for job in RING_JOBS for address in checked.get(job, [])]
    if not ring:
        raise ConfigError(
            'TF_CONFIG key "cluster" has neither "chief" nor "worker". Name at least one rank, '
            f"for example {_EXAMPLE}"
        )
    servers = [*ring, *checked.get(DATA, [])]
    address, times = collections.Counter(servers).most_common(1)[0]
    if times > 1:
        raise ConfigError(
            f'TF_CONFIG key "cluster" lists the address {shown(address)} more than once. '
            "Give every rank and every data worker its own port"
        )
    return checked


def _check_one_chief(jobs: dict[str, list[str]]) -> None:
    for job in (CHIEF, MASTER):
        if len(jobs.get(job, [])) > 1:
            raise ConfigError(
                f'TF_CONFIG key "{job}" lists {len(jobs[job])} addresses {shown(jobs[job])}. The '
                f'"cluster" in TF_CONFIG must have only one "{job}" node; list the others under '
                '"worker"'
            )
    if jobs.get(MASTER) == []:  # the stock RunConfig fails with it
        raise ConfigError(
            'TF_CONFIG key "master" lists no address. Give it one, or leave the key out'
        )
    if jobs.get(CHIEF) and jobs.get(MASTER):
        raise ConfigError(
            'TF_CONFIG key "cluster" has both "chief" and "master", which is its old name. If '
            "`master` node exists in `cluster`, job `chief` is not supported: name one of them"
        )


def _check_addresses(job: str, addresses: Any) -> list[str]:
    if not isinstance(addresses, (list, tuple)):
        raise ConfigError(
            f'TF_CONFIG key "{job}" is {shown(addresses)}, wanted a list of "host:port". '
            "List every task: sparse clusters are not supported"
        )
    for address in addresses:
        if not is_address(address):
            raise ConfigError(
                f'TF_CONFIG key "{job}" has the address {shown(address)}, wanted "host:port" with '
                "a port from 1 to 65535. Correct it"
            )
    return list(addresses)


def is_address(address: Any) -> bool:
    """Returns True for ``host:port`` with a port from 1 to 65535."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    is_number = port.isascii() and port.isdecimal() and len(port) <= _MAX_PORT_DIGITS
    return bool(host and colon and is_number and 0 < int(port) < 65536)


def check_task(jobs: Mapping[str, list[str]], task_type: Any, task_index: Any) -> tuple[str, int]:
    """Validates the task of this process. The jobs need not list an evaluator."""
    if task_type not in (*RING_JOBS, EVALUATOR, DATA):
        raise ConfigError(
            f'TF_CONFIG key "task": type {shown(task_type)} is not known. Use "chief", "worker", '
            '"evaluator" or "data"'
        )
    try:
        index = int(str(task_index))  # accepts "1", but neither 0.5 nor True
    except (TypeError, ValueError):
        raise ConfigError(
            f'TF_CONFIG key "index" is {shown(task_index)}, wanted a number from 0. Correct it'
        ) from None
    if index < 0:
        raise ConfigError(
            f'TF_CONFIG key "index" is {shown(index)}. Task index must be non-negative number.'
        )
    if task_type == EVALUATOR and jobs.get(MASTER):
        raise ConfigError(
            'TF_CONFIG key "task" names an evaluator, and the key "cluster" a "master", which '
            "evaluates by itself. If `master` node exists in `cluster`, task_type `evaluator` is "
            'not supported: name the master "chief"'
        )
    count = len(jobs.get(task_type, []))
    if task_type == EVALUATOR or index < count:
        return task_type, index
    if not count:
        raise ConfigError(
            f'TF_CONFIG key "task": {task_type} is not a valid task_type in the cluster_spec: '
            f'the key "cluster" lists no "{task_type}"'
        )
    raise ConfigError(
        f'TF_CONFIG key "index": {shown(index)} is not a valid task_id for task_type {task_type} '
        f"in the cluster_spec, which lists {count}. Use 0 to {count - 1}"
    )
