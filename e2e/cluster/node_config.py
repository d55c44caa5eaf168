"""The configuration files of a node's daemons, as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.cluster.packages import CNI_PLUGINS

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
DNS_SERVICE_IP = "10.96.0.10"
CLUSTER_DOMAIN = "cluster.local"
PAUSE_IMAGE = "localhost/everstep/pause:1"


def containerd(root: Path, cni_folder: Path, *, state: str = "/run/containerd", socket: str = CONTAINERD_SOCKET) -> str:
    return f"""\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
  address = "{socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # This machine may allow neither profiles to be loaded nor scores to be lowered.
  disable_apparmor = true
  restrict_oom_score_adj = true
  # Pods' network namespaces then vanish with the node's /run.
  netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{CNI_PLUGINS}"
  conf_dir = "{cni_folder}"
"""


def cni(pod_cidr: str) -> str:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": pod_cidr}]], "dataDir": "/var/lib/cni/networks"},
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "everstep", "plugins": [bridge, portmap]}, indent=1)


def kubelet(cgroup_root: str, client_ca: Path, resolv_conf: Path) -> str:
    document: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(client_ca)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup_root,
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "clusterDNS": [DNS_SERVICE_IP],
        "clusterDomain": CLUSTER_DOMAIN,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "failSwapOn": False,
        "resolvConf": str(resolv_conf),
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # All nodes share one disk: when it fills up, deleting images or pods on each of them helps nobody.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%"},
    }
    return json.dumps(document, indent=1)


def kube_proxy(kubeconfig: Path, node: str) -> str:
    document: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        # The limits belong to the whole machine; a node's namespace may not write them.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
    }
    return json.dumps(document, indent=1)
