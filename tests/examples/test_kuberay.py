"""The manifest for KubeRay has the fields of the API, and its graph file is one that flowrt reads.

The structs have what the manifest uses of the reference (ray.io/v1 of KubeRay 1.6, Kubernetes 1.30); any other field is an error, as it is
for `kubectl apply --validate=strict`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import yaml

from flowrt.api.opening import read_graph

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kuberay" / "cluster.yaml"
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
PortName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,15}$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Quantity = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Fields(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class Metadata(Fields):
    name: Name | None = None
    labels: dict[str, str] = {}


class ContainerPort(Fields):
    container_port: Port
    name: PortName


class Resources(Fields):
    requests: dict[Literal["cpu", "memory"], Quantity]
    limits: dict[Literal["cpu", "memory"], Quantity]


class VolumeMount(Fields):
    name: Name
    mount_path: Annotated[str, msgspec.Meta(pattern="^/[^:]+$")]
    read_only: bool = False


class Container(Fields):
    name: Name
    image: str
    resources: Resources
    ports: list[ContainerPort] = []
    volume_mounts: list[VolumeMount] = []


class ConfigMapVolume(Fields):
    name: Name


class ClaimVolume(Fields):
    claim_name: Name
    read_only: bool = False


class EmptyVolume(Fields):
    size_limit: Quantity


class Volume(Fields):
    name: Name
    config_map: ConfigMapVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyVolume | None = None


class Selector(Fields):
    match_labels: dict[str, str]


class SpreadConstraint(Fields):
    max_skew: Annotated[int, msgspec.Meta(ge=1)]
    topology_key: str
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    label_selector: Selector


class PodSpec(Fields):
    containers: Annotated[list[Container], msgspec.Meta(min_length=1)]
    volumes: list[Volume] = []
    topology_spread_constraints: list[SpreadConstraint] = []


class PodTemplate(Fields):
    spec: PodSpec
    metadata: Metadata = msgspec.field(default_factory=Metadata)


class HeadGroup(Fields):
    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(Fields):
    group_name: Name
    replicas: Count
    min_replicas: Count
    max_replicas: Count
    ray_start_params: dict[str, str]
    template: PodTemplate


class AuthOptions(Fields):
    mode: Literal["token", "disabled"]


class ClusterSpec(Fields):
    ray_version: str
    auth_options: AuthOptions
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayCluster(Fields, tag_field="kind", tag="RayCluster"):
    api_version: Literal["ray.io/v1"]
    metadata: Metadata
    spec: ClusterSpec


class ConfigMap(Fields, tag_field="kind", tag="ConfigMap"):
    api_version: Literal["v1"]
    metadata: Metadata
    data: dict[str, str]


class PolicyPeer(Fields):
    pod_selector: Selector | None = None
    namespace_selector: Selector | None = None


class PolicyPort(Fields):
    protocol: Literal["TCP", "UDP"]
    port: Port


class IngressRule(Fields):
    from_: list[PolicyPeer] = msgspec.field(default_factory=list, name="from")
    ports: list[PolicyPort] = []


class PolicySpec(Fields):
    pod_selector: Selector
    policy_types: list[Literal["Ingress", "Egress"]]
    ingress: list[IngressRule]


class NetworkPolicy(Fields, tag_field="kind", tag="NetworkPolicy"):
    api_version: Literal["networking.k8s.io/v1"]
    metadata: Metadata
    spec: PolicySpec


def validate(text: str) -> tuple[ConfigMap, RayCluster, NetworkPolicy]:
    documents = list(yaml.safe_load_all(text))
    config, cluster, policy = [msgspec.convert(each, ConfigMap | RayCluster | NetworkPolicy) for each in documents]
    assert isinstance(config, ConfigMap)
    assert isinstance(cluster, RayCluster)
    assert isinstance(policy, NetworkPolicy)
    return config, cluster, policy


def test_the_manifest_has_the_fields_of_the_api() -> None:
    config, cluster, policy = validate(MANIFEST.read_text())
    pods = [cluster.spec.head_group_spec.template, *(group.template for group in cluster.spec.worker_group_specs)]
    for pod in pods:
        volumes = {volume.name for volume in pod.spec.volumes}
        assert {mount.name for container in pod.spec.containers for mount in container.volume_mounts} == volumes
        assert all(sum(bool(each) for each in (v.config_map, v.persistent_volume_claim, v.empty_dir)) == 1 for v in pod.spec.volumes)
        for constraint in pod.spec.topology_spread_constraints:
            assert constraint.label_selector.match_labels.items() <= pod.metadata.labels.items()
    mapped = {volume.config_map.name for pod in pods for volume in pod.spec.volumes if volume.config_map}
    assert mapped == {config.metadata.name}
    assert policy.spec.pod_selector.match_labels == {"ray.io/cluster": cluster.metadata.name}
    assert tuple(map(int, cluster.spec.ray_version.split("."))) >= (2, 52, 0), "the first with token authentication"


def test_its_graph_uses_the_hosts_and_the_model_that_the_pods_have(tmp_path: Path) -> None:
    config, cluster, _ = validate(MANIFEST.read_text())
    (path := tmp_path / "graph.yaml").write_text(config.data["graph.yaml"])
    graph = read_graph(path, model=ROOT / "examples" / "tiny-moe")
    assert graph.hosts is not None
    assert graph.hosts.count == 1 + sum(group.replicas for group in cluster.spec.worker_group_specs)
    assert set(graph.process_hosts.values()) == set(graph.hosts.names)
    (model_path,) = re.findall(r"model: \{path: (\S+)\}", config.data["graph.yaml"])
    head = cluster.spec.head_group_spec.template.spec.containers[0]
    assert any(model_path.startswith(f"{mount.mount_path}/") for mount in head.volume_mounts)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("minReplicas: 2", "minReplica: 2"),
        ("mode: token", "mode: tokens"),
        ("containerPort: 8000", "containerPort: 80000"),
        ("memory: 16Gi", "memory: 16 Gi"),
        ("kind: RayCluster", "kind: RayClusters"),
        ("DoNotSchedule", "Never"),
    ],
)
def test_mistakes_are_found(old: str, new: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        validate(MANIFEST.read_text().replace(old, new, 1))
