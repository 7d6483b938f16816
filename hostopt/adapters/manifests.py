"""Manifests that train on Kubernetes: an Indexed Job, a TFJob or a TrainJob.

Exit codes decide whether failed pods are started again, as for `hostopt run`. Kubeflow's training
operator has a rule of its own for a TFJob, which takes the codes below 128 as permanent.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hostopt.adapters.place import PORT
from hostopt.launch import restarts
from hostopt.options import SIZE

Manifest = dict[str, Any]
# Exit codes after which no pod is started again.
PERMANENT = [code for code in range(1, 256) if restarts.is_permanent(code)]
_GRACE_S = 60  # ranks save a checkpoint for up to 25 s after SIGTERM
_TOKEN = "token"


@dataclass(frozen=True)
class Training:
    """A training to be run on Kubernetes."""

    name: str
    image: str
    command: Sequence[str]
    size: int
    evaluators: int = 0
    restarts: int = 5
    resources: dict[str, str] = field(default_factory=dict)  # limits, as {"nvidia.com/gpu": "1"}
    claims: dict[str, str] = field(default_factory=dict)  # mount paths by PersistentVolumeClaim


def job(training: Training) -> list[Manifest]:
    """Returns an Indexed Job, with the service by which its pods reach each other.

    A failed pod ends the others, as they lose a rank, and each is started again.
    """
    count = training.size + training.evaluators
    pod = _pod(training, "hostopt", _exec(training), {SIZE: str(count)})
    pod["subdomain"] = training.name
    specification = {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        **_restarts(training, count),
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # ranks look for each other when they start
        "selector": {"batch.kubernetes.io/job-name": training.name},
    }
    return [
        _secret(training),
        _object("v1", "Service", training.name, spec=service),
        _object("batch/v1", "Job", training.name, spec=specification),
    ]


def tfjob(training: Training) -> list[Manifest]:
    """Returns a TFJob of Kubeflow's training operator, which sets TF_CONFIG.

    The operator sets no TF_CONFIG for a single process, and lists no evaluators in it.
    """
    counts = {"Chief": 1, "Worker": training.size - 1, "Evaluator": training.evaluators}
    is_alone = sum(counts.values()) == 1
    command = training.command if is_alone else ["hostopt", "exec", "--", *training.command]
    pod = _pod(training, "tensorflow", command, {})
    pod["containers"][0]["ports"] = [{"name": "tfjob-port", "containerPort": PORT}]
    replicas = {
        kind: {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": pod}}
        for kind, count in counts.items()
        if count
    }
    specification = {
        "runPolicy": {
            "cleanPodPolicy": "None",  # the evaluator ends after the chief
            "backoffLimit": training.restarts * sum(counts.values()),
        },
        "tfReplicaSpecs": replicas,
    }
    return [
        _secret(training),
        _object("kubeflow.org/v1", "TFJob", training.name, spec=specification),
    ]


def trainjob(training: Training) -> list[Manifest]:
    """Returns a TrainJob of Kubeflow Trainer 2, with a plain runtime."""
    count = training.size + training.evaluators
    pod = _pod(training, "node", _exec(training), {SIZE: str(count)})
    node_job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                **_restarts(training, count),
                "template": {"spec": {"restartPolicy": "Never", **pod}},
            },
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": count},
        "template": {"spec": {"replicatedJobs": [node_job]}},
    }
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": training.name,
    }
    return [
        _secret(training),
        _object(_TRAINER, "TrainingRuntime", training.name, spec=runtime),
        _object(_TRAINER, "TrainJob", training.name, spec={"runtimeRef": reference}),
    ]


_TRAINER = "trainer.kubeflow.org/v1alpha1"
KINDS = {"job": job, "tfjob": tfjob, "trainjob": trainjob}


def to_json(manifests: Sequence[Manifest]) -> str:
    """Returns a list of manifests as JSON, for `kubectl apply`."""
    manifest_list = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
    return json.dumps(manifest_list, indent=2, ensure_ascii=False) + "\n"


def _object(version: str, kind: str, name: str, **content: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


def _secret(training: Training) -> Manifest:
    content = {_TOKEN: secrets.token_hex(32)}
    return _object("v1", "Secret", _secret_name(training), stringData=content)


def _secret_name(training: Training) -> str:
    return f"{training.name}-token"


def _restarts(training: Training, count: int) -> Manifest:
    """Returns the part of a Job that decides whether a failed pod is started again."""
    disruption = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {"action": "Ignore", "onPodConditions": [disruption]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": PERMANENT}},
    ]
    return {"backoffLimit": training.restarts * count, "podFailurePolicy": {"rules": rules}}


def _exec(training: Training) -> list[str]:
    evaluators = ["--evaluators", str(training.evaluators)] if training.evaluators else []
    return ["hostopt", "exec", *evaluators, "--", *training.command]


def _pod(
    training: Training, container: str, command: Sequence[str], variables: dict[str, str]
) -> Manifest:
    key = {"secretKeyRef": {"name": _secret_name(training), "key": _TOKEN}}
    environment: list[Manifest] = [{"name": "HOSTOPT_TOKEN", "valueFrom": key}]
    environment += [{"name": name, "value": value} for name, value in variables.items()]
    main: Manifest = {
        "name": container,
        "image": training.image,
        "command": list(command),
        "env": environment,
    }
    pod: Manifest = {"terminationGracePeriodSeconds": _GRACE_S, "containers": [main]}
    if training.resources:
        main["resources"] = {"limits": training.resources}
    if training.claims:
        main["volumeMounts"] = [
            {"name": claim, "mountPath": path} for claim, path in training.claims.items()
        ]
        pod["volumes"] = [
            {"name": claim, "persistentVolumeClaim": {"claimName": claim}}
            for claim in training.claims
        ]
    return pod
