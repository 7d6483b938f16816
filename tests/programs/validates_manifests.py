"""Checks the manifests on standard input against the schemas of Kubernetes and Kubeflow."""

import json
import sys

import kubernetes_validate


def check_tfjob(manifest):
    from kubeflow.training import ApiClient, models

    class Response:
        data = json.dumps(manifest)

    client = ApiClient()
    job = client.deserialize(Response(), models.KubeflowOrgV1TFJob)
    assert client.sanitize_for_serialization(job) == manifest, "unknown fields"


def check_trainer(manifest):
    from kubeflow_trainer_api import models

    model = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
    assert model.from_dict(manifest).to_dict() == manifest, "unknown fields"


for manifest in json.load(sys.stdin)["items"]:
    group = manifest["apiVersion"].partition("/")[0]
    if group == "kubeflow.org":
        check_tfjob(manifest)
    elif group == "trainer.kubeflow.org":
        check_trainer(manifest)
    else:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    print(manifest["kind"])
