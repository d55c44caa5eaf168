"""The names of a pod's fields that the API passes through, for the CRD alone.

For the API server's rules two objects are equal if all fields that the schema declares are, and if as many others are
there: an `emptyDir` that becomes a claim, or a `nodeSelector` an affinity, would be no change. So the schema declares
fields that are passed through too, without a type: whatever is in them is compared, kept, and checked with the pod.
"""

from __future__ import annotations

from typing import Any

# As in Kubernetes 1.36 (k8s.io/api/core/v1), with kinds of volumes that it has given up.
_POD_SPEC = (
    "affinity dnsConfig dnsPolicy enableServiceLinks ephemeralContainers hostAliases hostUsers hostnameOverride "
    "imagePullSecrets initContainers nodeSelector os overhead preemptionPolicy priority priorityClassName "
    "readinessGates resourceClaims resources runtimeClassName schedulerName schedulingGates schedulingGroup "
    "securityContext serviceAccount tolerations topologySpreadConstraints"
)
_CONTAINER = (
    "envFrom lifecycle livenessProbe ports readinessProbe resizePolicy restartPolicyRules securityContext startupProbe "
    "stdin stdinOnce terminationMessagePath terminationMessagePolicy tty volumeDevices volumeMounts workingDir"
)
_VOLUME = (
    "awsElasticBlockStore azureDisk azureFile cephfs cinder configMap csi downwardAPI emptyDir ephemeral fc flexVolume "
    "flocker gcePersistentDisk gitRepo glusterfs hostPath image iscsi nfs persistentVolumeClaim photonPersistentDisk "
    "portworxVolume projected quobyte rbd scaleIO secret storageos vsphereVolume"
)
_ENV_VAR_SOURCE = "configMapKeyRef fieldRef fileKeyRef resourceFieldRef secretKeyRef"

FIELDS_BY_PATH = {
    path: tuple(names.split())
    for path, names in {
        "spec.env[].valueFrom": _ENV_VAR_SOURCE,
        "spec.checkpoint.volume.persistentVolumeClaim": "claimName readOnly",
        "spec.checkpoint.volume.ephemeral": "volumeClaimTemplate",
        "spec.checkpoint.volume.nfs": "path readOnly server",
        "spec.checkpoint.volume.csi": "driver fsType nodePublishSecretRef readOnly volumeAttributes",
        "spec.checkpoint.volume.hostPath": "path type",
        "spec.podTemplate.spec": _POD_SPEC,
        "spec.podTemplate.spec.containers[]": _CONTAINER,
        "spec.podTemplate.spec.containers[].env[]": "name value valueFrom",
        "spec.podTemplate.spec.containers[].resources": "claims limits requests",
        "spec.podTemplate.spec.volumes[]": _VOLUME,
    }.items()
}
"""The names of an object's fields, by its path in a TrainingJob."""


def declare_passed_fields(schema: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return a structural schema in which the fields that are passed through are declared.

    Args:
        schema: The schema of an object, as the models have it.
        path: Where it is in the resource.
    """
    out = dict(schema)
    if names := FIELDS_BY_PATH.get(path):
        any_value = {"nullable": True, "x-kubernetes-preserve-unknown-fields": True}
        out["properties"] = {**schema.get("properties", {}), **dict.fromkeys(names, any_value)}
    elif "properties" not in schema and "items" not in schema:
        return schema
    if "items" in schema:
        out["items"] = declare_passed_fields(schema["items"], f"{path}[]")
    if "properties" in schema:
        below = f"{path}." if path else ""
        declared = {name: declare_passed_fields(each, f"{below}{name}") for name, each in schema["properties"].items()}
        out["properties"] = {**out["properties"], **declared}
    return out
