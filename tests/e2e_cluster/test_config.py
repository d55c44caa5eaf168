"""Configuration files say what the nodes rely on."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import yaml

from e2e.cluster import controlplane_flags, dns, kwok, node_config
from e2e.cluster.controlplane_flags import ClientLimits


def test_containerd_keeps_to_its_own_folders() -> None:
    document = tomllib.loads(node_config.containerd(Path("/root-of/node-1"), Path("/conf")))
    plugin = document["plugins"]["io.containerd.grpc.v1.cri"]
    assert document["root"] == "/root-of/node-1"
    assert plugin["cni"]["conf_dir"] == "/conf"
    assert plugin["netns_mounts_under_state_dir"]
    assert plugin["sandbox_image"] == node_config.PAUSE_IMAGE


def test_pods_of_a_node_get_addresses_of_its_range() -> None:
    document = json.loads(node_config.cni("10.201.7.0/24"))
    assert document["plugins"][0]["ipam"]["ranges"] == [[{"subnet": "10.201.7.0/24"}]]


def test_kubelet_puts_pods_below_its_own_cgroup_and_deletes_no_images() -> None:
    document = json.loads(node_config.kubelet("/everstep/node-1/pods", Path("/ca"), Path("/resolv")))
    assert document["cgroupRoot"] == "/everstep/node-1/pods"
    assert document["cgroupsPerQOS"]
    assert document["imageGCHighThresholdPercent"] == 100
    assert document["clusterDNS"] == [node_config.DNS_SERVICE_IP]


def test_kube_proxy_leaves_the_machines_conntrack_limits_alone() -> None:
    document = json.loads(node_config.kube_proxy(Path("/kubeconfig"), "node-1"))
    assert set(document["conntrack"].values()) <= {0, "0s"}


def test_reverse_zones_are_served_and_outside_names_do_not_exist() -> None:
    text = dns.corefile(Path("/kubeconfig"))
    inside, outside = text.split(f"\n.:{dns.PORT}")
    assert f"in-addr.arpa:{dns.PORT}" in inside
    assert "NXDOMAIN" in outside
    assert "NXDOMAIN" not in inside


def test_dns_service_has_no_selector_and_its_slice_leads_to_the_host() -> None:
    service, endpoint_slice = dns.objects()
    assert "selector" not in service["spec"]
    assert endpoint_slice["metadata"]["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]
    assert {port["port"] for port in endpoint_slice["ports"]} == {dns.PORT}


def test_pretended_nodes_finish_no_pods() -> None:
    documents = list(yaml.safe_load_all(kwok.CONFIG.read_text()))
    names = {each["metadata"]["name"] for each in documents if each["kind"] == "Stage"}
    assert names == {"node-initialize", "node-heartbeat-with-lease", "pod-ready", "pod-delete"}


def test_pretended_nodes_repel_what_does_not_ask_for_them() -> None:
    node = kwok.node_object(1, 100, gpus=4)
    assert node["spec"]["taints"] == [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]
    assert node["metadata"]["labels"]["type"] == "kwok"
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"


def test_controllers_keep_their_own_limits_unless_told_otherwise() -> None:
    default = controlplane_flags.scheduler_command(Path("/x"), ClientLimits())
    raised = controlplane_flags.scheduler_command(Path("/x"), ClientLimits(500, 1000))
    assert not [flag for flag in default if "kube-api" in flag]
    assert {"--kube-api-qps=500", "--kube-api-burst=1000"} <= set(raised)


def test_api_server_reaches_nodes_by_address() -> None:
    command = controlplane_flags.apiserver_command("10.0.0.1", 6443, 2379, Path("/x"))
    assert "--kubelet-preferred-address-types=InternalIP" in command
    assert "--authorization-mode=Node,RBAC" in command
