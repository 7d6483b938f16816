"""`hostopt k8s`: manifests of an Indexed Job, a TFJob or a TrainJob."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hostopt.adapters.launchers import PORT
from hostopt.commands import arguments
from hostopt.launch import restarts
from hostopt.options import SIZE


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "k8s",
        help="print manifests that train on Kubernetes",
        usage="hostopt k8s --image IMAGE -np N [--kind KIND] [--name NAME] [--evaluators K] "
        "[--max-restarts R] [--limit NAME=COUNT] [--volume CLAIM:PATH] [--] command [args ...]",
        description="Print the manifests of a training: an Indexed Job, a TFJob or a TrainJob, "
        "and a Secret with a new token. Give them to `kubectl apply -f -`.",
        allow_abbrev=False,
    )
    parser.add_argument("--image", required=True, help="image with hostopt and the program")
    arguments.add_size(parser, "number of ranks")
    parser.add_argument(
        "--kind", choices=list(KINDS), default="job", help="kind of the training (default: job)"
    )
    parser.add_argument(
        "--name", type=_name, default="hostopt", help="name of the objects (default: hostopt)"
    )
    arguments.add_count(parser, "--evaluators", "number of evaluators")
    meaning = (
        "restarts for each pod, of all pods together, after failures that may be temporary; "
        "not limited in a TFJob"
    )
    arguments.add_number(parser, "--max-restarts", "R", 0, arguments.MAX_TIMES, meaning, default=5)
    meaning = "resource of each pod, such as nvidia.com/gpu=1"
    _add_pairs(parser, "--limit", "=", "NAME=COUNT", meaning)
    meaning = "PersistentVolumeClaim that all pods mount, for model_dir"
    _add_pairs(parser, "--volume", ":", "CLAIM:PATH", meaning)
    arguments.add_command(parser, "the command of each pod")
    parser.set_defaults(run=_print, parser=parser)


def _print(options: argparse.Namespace) -> None:
    if KINDS[options.kind] is tfjob and options.evaluators > 1:
        options.parser.error(
            "a TFJob has at most one evaluator: use --evaluators 1, or another kind"
        )
    training = Training(
        options.name,
        options.image,
        arguments.command_of(options),
        options.np,
        options.evaluators,
        options.max_restarts,
        dict(options.limit),
        dict(options.volume),
    )
    sys.stdout.write(to_json(KINDS[options.kind](training)))


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name for Kubernetes: use up to 42 lower-case letters, digits and -"
        )
    return text


def _add_pairs(
    parser: argparse.ArgumentParser, name: str, separator: str, metavar: str, meaning: str
) -> None:
    def pair(text: str) -> tuple[str, str]:
        name, found, value = text.partition(separator)
        if not (name and found and value):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME{separator}VALUE")
        return name, value

    meaning = f"{meaning}; may be repeated"
    parser.add_argument(
        name, type=pair, action="append", default=[], metavar=metavar, help=meaning
    )


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

    @property
    def count(self) -> int:
        """Number of pods."""
        return self.size + self.evaluators

    @property
    def secret(self) -> str:
        """Name of the secret with the token."""
        return f"{self.name}-token"


def job(training: Training) -> list[Manifest]:
    """Returns an Indexed Job, with the service by which its pods reach each other."""
    specification = {
        "completions": training.count,
        "parallelism": training.count,
        "completionMode": "Indexed",
        **_pods(training, "hostopt", subdomain=training.name),
    }
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # ranks look for each other when they start
        "selector": {"batch.kubernetes.io/job-name": training.name},
    }
    return _manifests(training, ("v1", "Service", service), ("batch/v1", "Job", specification))


def tfjob(training: Training) -> list[Manifest]:
    """Returns a TFJob of Kubeflow's training operator, which sets TF_CONFIG.

    The operator sets no TF_CONFIG for a single process, and lists no evaluators in it.
    """
    counts = {"Chief": 1, "Worker": training.size - 1, "Evaluator": training.evaluators}
    starter = ["hostopt", "exec", "--"] if training.count > 1 else []
    command = [*starter, *training.command]
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
            "backoffLimit": training.restarts * training.count,
        },
        "tfReplicaSpecs": replicas,
    }
    return _manifests(training, ("kubeflow.org/v1", "TFJob", specification))


def trainjob(training: Training) -> list[Manifest]:
    """Returns a TrainJob of Kubeflow Trainer 2, with a plain runtime."""
    node_job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": _pods(training, "node"),
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": training.count},
        "template": {"spec": {"replicatedJobs": [node_job]}},
    }
    group, kind = "trainer.kubeflow.org", "TrainingRuntime"
    reference = {"apiGroup": group, "kind": kind, "name": training.name}
    version = f"{group}/v1alpha1"
    return _manifests(
        training, (version, kind, runtime), (version, "TrainJob", {"runtimeRef": reference})
    )


KINDS = {"job": job, "tfjob": tfjob, "trainjob": trainjob}


def to_json(manifests: Sequence[Manifest]) -> str:
    """Returns a list of manifests as JSON, for `kubectl apply`."""
    manifest_list = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
    return json.dumps(manifest_list, indent=2, ensure_ascii=False) + "\n"


def _manifests(training: Training, *objects: tuple[str, str, Manifest]) -> list[Manifest]:
    """Returns a secret with a new token, and objects of versions, kinds and specifications."""

    def manifest(version: str, kind: str, name: str, **content: Any) -> Manifest:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}

    token = {_TOKEN: secrets.token_hex(32)}
    return [
        manifest("v1", "Secret", training.secret, stringData=token),
        *(manifest(version, kind, training.name, spec=spec) for version, kind, spec in objects),
    ]


def _pods(training: Training, container: str, **more: str) -> Manifest:
    """Returns the part of a Job that says what its pods are, and when they are started again."""
    disruption = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {"action": "Ignore", "onPodConditions": [disruption]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": PERMANENT}},
    ]
    evaluators = ["--evaluators", str(training.evaluators)] if training.evaluators else []
    command = ["hostopt", "exec", *evaluators, "--", *training.command]
    pod = _pod(training, container, command, {SIZE: str(training.count)})
    return {
        "backoffLimit": training.restarts * training.count,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": {"restartPolicy": "Never", **pod, **more}},
    }


def _pod(
    training: Training, container: str, command: Sequence[str], variables: dict[str, str]
) -> Manifest:
    key = {"secretKeyRef": {"name": training.secret, "key": _TOKEN}}
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
