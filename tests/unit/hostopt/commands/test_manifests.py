"""Manifests that `hostopt k8s` prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from k8s_training import TRAINING

from hostopt import __main__ as cli
from hostopt.commands.k8s import Training, job, tfjob, trainjob
from hostopt.errors import AuthError, ConfigError, PeerLostError, ProtocolError
from hostopt.launch import restarts


def container_of(pod: Any) -> Any:
    (container,) = pod["containers"]
    return container


@pytest.mark.parametrize("kind", [job, trainjob])
def test_exit_codes_that_fail_the_job_are_those_that_end_hostopt_run(kind: Any) -> None:
    manifest = next(each for each in kind(TRAINING) if each["kind"] in ("Job", "TrainingRuntime"))
    specification = manifest["spec"]
    if kind is trainjob:
        (replicated,) = specification["template"]["spec"]["replicatedJobs"]
        specification = replicated["template"]["spec"]
    disruption, failure = specification["podFailurePolicy"]["rules"]
    assert (disruption["action"], failure["action"]) == ("Ignore", "FailJob")
    assert failure["onExitCodes"]["operator"] == "In"
    values = failure["onExitCodes"]["values"]
    assert len(values) <= 255  # Kubernetes accepts no more
    assert values == sorted(values)
    assert {*values} == {code for code in range(256) if restarts.is_permanent(code)}
    assert {1, 2, ConfigError.exit_code, AuthError.exit_code} <= {*values}
    assert not {0, ProtocolError.exit_code, 137, 143, PeerLostError.exit_code} & {*values}
    assert specification["backoffLimit"] == 8


def test_a_job_has_a_pod_for_each_process() -> None:
    secret, service, object_ = job(TRAINING)
    assert object_["spec"]["completions"] == object_["spec"]["parallelism"] == 4
    pod = object_["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {"name": "HOSTOPT_SIZE", "value": "4"} in container_of(pod)["env"]
    assert container_of(pod)["command"] == [
        "hostopt",
        "exec",
        "--evaluators",
        "1",
        "--",
        *TRAINING.command,
    ]
    token = container_of(pod)["env"][0]["valueFrom"]["secretKeyRef"]
    assert token["name"] == secret["metadata"]["name"]
    assert token["key"] in secret["stringData"]


def test_tokens_are_new() -> None:
    first, second = (job(TRAINING)[0]["stringData"]["token"] for _ in range(2))
    assert len(first) == 64
    assert first != second


def test_a_tfjob_has_a_chief_workers_and_an_evaluator() -> None:
    _, object_ = tfjob(TRAINING)
    replicas = object_["spec"]["tfReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {
        "Chief": 1,
        "Worker": 2,
        "Evaluator": 1,
    }
    assert container_of(replicas["Chief"]["template"]["spec"])["name"] == "tensorflow"


def test_one_rank_needs_no_workers() -> None:
    _, object_ = tfjob(Training("a", "b", ["c"], 1))
    assert [*object_["spec"]["tfReplicaSpecs"]] == ["Chief"]
    # the operator sets no TF_CONFIG
    chief = object_["spec"]["tfReplicaSpecs"]["Chief"]
    assert container_of(chief["template"]["spec"])["command"] == ["c"]


def test_the_evaluator_of_a_tfjob_outlives_the_chief() -> None:
    _, object_ = tfjob(Training("a", "b", ["c"], 1, evaluators=1))
    assert object_["spec"]["runPolicy"]["cleanPodPolicy"] == "None"
    chief = object_["spec"]["tfReplicaSpecs"]["Chief"]
    assert container_of(chief["template"]["spec"])["command"] == ["hostopt", "exec", "--", "c"]


def test_a_trainjob_names_its_runtime() -> None:
    _, runtime, object_ = trainjob(TRAINING)
    assert object_["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 4


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--image", "i", "-np", "2", "--limit", "cpu=4", "--volume", "models:/models"]
    assert cli.main(["k8s", *arguments, "--", "python", "main.py"]) == 0
    manifests = json.loads(capsys.readouterr().out)
    assert (manifests["apiVersion"], manifests["kind"]) == ("v1", "List")
    assert [each["kind"] for each in manifests["items"]] == ["Secret", "Service", "Job"]
    container = container_of(manifests["items"][2]["spec"]["template"]["spec"])
    assert container["resources"]["limits"] == {"cpu": "4"}
    assert container["volumeMounts"][0]["mountPath"] == "/models"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--name", "Digits"],
        ["--name", "a" * 43],
        ["--limit", "cpu"],
        ["--volume", "models"],
        ["--kind", "pod"],
        ["-np", "0"],
        ["--kind", "tfjob", "--evaluators", "2"],
    ],
)
def test_arguments_that_kubernetes_would_refuse(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["k8s", "--image", "i", "-np", "2", *arguments, "main.py"])
    assert "usage: hostopt k8s" in capsys.readouterr().err
