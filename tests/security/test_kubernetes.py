"""The Kubernetes manifests: valid by Kubernetes' own schemas, and closed to other pods.

The schemas come with kubernetes-validate. Those of KubeRay's RayCluster and RayJob are in no package registry: of these
two kinds, the pod templates are validated, and the names of the other fields are compared with a list made by hand from
KubeRay's reference.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from tandem.protocol.network_keys import PARTS
from tests.support.settings import cluster_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUBERNETES_VERSION = "1.34"  # not the newest, whose fields older clusters would refuse
GUIDE = (ROOT / "docs" / "deploy.md").read_text()

RAY_CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_FIELDS = {"rayStartParams", "template"}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
RAY_JOB_FIELDS = {"entrypoint", "submissionMode", "shutdownAfterJobFinishes", "rayClusterSpec"}

Document = dict[str, Any]


def documents(name: str) -> list[Document]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


def ray_cluster(document: Document) -> Document | None:
    """Returns the cluster's spec of a RayCluster or RayJob, None for other kinds."""
    if document["kind"] not in ("RayCluster", "RayJob"):
        return None
    spec: Document = document["spec"]
    return spec if document["kind"] == "RayCluster" else spec["rayClusterSpec"]


def pod_templates(document: Document) -> Iterator[Document]:
    cluster = ray_cluster(document)
    if cluster is not None:
        yield from (group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])
    elif document["kind"] == "Deployment":
        yield document["spec"]["template"]


DEPLOYMENTS = {
    "one node": documents("tandem.yaml"),
    "RayCluster": documents("ray-base.yaml") + documents("raycluster.yaml"),
    "RayJob": documents("ray-base.yaml") + documents("rayjob.yaml"),
}
"""Documents that are applied together."""
ALL = [pytest.param(deployment, id=name) for name, deployment in DEPLOYMENTS.items()]
PODS = [
    pytest.param(deployment, template, id=f"{name}, {template['spec']['containers'][0]['name']}")
    for name, deployment in DEPLOYMENTS.items()
    for document in deployment
    for template in pod_templates(document)
]


def named(deployment: list[Document], kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in deployment if each["kind"] == kind}


def selects(selector: Document, labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items()


def validate(document: Document) -> None:
    """Raises ValidationError also for unknown fields. Of KubeRay's kinds, only the pod templates are validated."""
    if ray_cluster(document) is None:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    for template in pod_templates(document):
        pod_template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "t"}, "template": template}
        kubernetes_validate.validate(pod_template, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("deployment", ALL)
def test_every_document_is_valid_by_the_schemas_of_kubernetes(deployment: list[Document]) -> None:
    for document in deployment:
        validate(document)


@pytest.mark.parametrize("deployment", ALL)
def test_the_validation_finds_a_misspelt_field_of_a_pod(deployment: list[Document]) -> None:
    [workload] = [copy.deepcopy(each) for each in deployment if any(pod_templates(each))]
    next(pod_templates(workload))["spec"]["containers"][0]["securityContxt"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="securityContxt"):
        validate(workload)


def test_kuberays_own_fields_are_known_ones() -> None:
    [cluster], [job] = documents("raycluster.yaml"), documents("rayjob.yaml")
    assert set(job["spec"]) == RAY_JOB_FIELDS
    assert cluster["spec"] == job["spec"]["rayClusterSpec"]
    spec = cluster["spec"]
    assert set(spec) == RAY_CLUSTER_FIELDS
    assert set(spec["headGroupSpec"]) == HEAD_FIELDS
    assert all(set(group) == GROUP_FIELDS for group in spec["workerGroupSpecs"])
    assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(("deployment", "template"), PODS)
def test_no_container_has_privileges(deployment: list[Document], template: Document) -> None:
    """What Pod Security's level "restricted" demands, a read-only root, and no token of Kubernetes' API."""
    pod = template["spec"]
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert all("hostPort" not in port for port in container["ports"])
    assert all({"configMap", "secret", "emptyDir"} & set(volume) for volume in pod["volumes"])
    assert pod["automountServiceAccountToken"] is False
    assert named(deployment, "ServiceAccount")[pod["serviceAccountName"]]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(("deployment", "template"), PODS)
def test_every_container_is_pinned_limited_and_probed(deployment: list[Document], template: Document) -> None:
    for container in template["spec"]["containers"]:
        assert re.fullmatch(r"YOUR_REGISTRY/tandem-serve@YOUR_IMAGES_DIGEST", container["image"])
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert {"cpu", "memory", "ephemeral-storage"} <= set(limits) == set(requests)
        assert limits["memory"] == requests["memory"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
    assert all("sizeLimit" in volume["emptyDir"] for volume in template["spec"]["volumes"] if "emptyDir" in volume)


@pytest.mark.parametrize("deployment", ALL)
def test_workers_reserve_gpus_and_have_shared_memory(deployment: list[Document]) -> None:
    """NCCL exchanges data between the processes of a pod in /dev/shm, of which a container has 64 MiB by default."""
    num_with_gpus = 0
    for template in (template for document in deployment for template in pod_templates(document)):
        in_memory = {
            volume["name"]: volume["emptyDir"]["sizeLimit"]
            for volume in template["spec"]["volumes"]
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        }
        for container in template["spec"]["containers"]:
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            assert limits.get("nvidia.com/gpu") == requests.get("nvidia.com/gpu"), "GPUs cannot be overcommitted"
            num_with_gpus += "nvidia.com/gpu" in limits
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            size = in_memory[mounts["/dev/shm"]]
            assert size.endswith("Gi") and limits["memory"].endswith("Gi")
            assert int(size.removesuffix("Gi")) <= int(limits["memory"].removesuffix("Gi"))
    assert num_with_gpus == 1


def test_kubernetes_asks_the_proxy_whether_it_lives_and_is_ready() -> None:
    [deployment] = named(DEPLOYMENTS["one node"], "Deployment").values()
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/live", "readinessProbe": "/health", "livenessProbe": "/live"}


def test_probes_ask_a_port_that_clients_cannot_reach() -> None:
    """Clients can take all connections of the public port, and Kubernetes would restart the pod."""
    deployment = DEPLOYMENTS["one node"]
    [workload] = named(deployment, "Deployment").values()
    [container] = workload["spec"]["template"]["spec"]["containers"]
    probed = {container[probe]["httpGet"]["port"] for probe in container if probe.endswith("Probe")}
    reachable = {
        port["targetPort"] for service in named(deployment, "Service").values() for port in service["spec"]["ports"]
    }
    for policy in named(deployment, "NetworkPolicy").values():
        reachable |= {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert not probed & reachable
    config = cluster_config(**msgspec.toml.decode(named(deployment, "ConfigMap")["tandem"]["data"]["cluster.toml"]))
    declared = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {declared[port] for port in probed} == {config.admin_address[1]}
    assert config.admin_address[0] == "0.0.0.0", "the kubelet asks the pod's address"


@pytest.mark.parametrize(("deployment", "template"), PODS)
def test_every_mount_exists_and_every_secret_is_made_by_the_guide(
    deployment: list[Document], template: Document
) -> None:
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for container in template["spec"]["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    for volume in volumes.values():
        if "configMap" in volume:
            assert volume["configMap"]["name"] in named(deployment, "ConfigMap")
        if "secret" in volume:
            assert f"kubectl create secret generic {volume['secret']['secretName']} " in GUIDE
            assert volume["secret"]["defaultMode"] == 0o440  # the pod's user reads it by its group
            assert template["spec"]["securityContext"]["fsGroup"] == template["spec"]["securityContext"]["runAsGroup"]


@pytest.mark.parametrize("deployment", ALL)
def test_keys_are_mounted_where_the_configuration_looks_for_them(deployment: list[Document]) -> None:
    text = named(deployment, "ConfigMap")["tandem"]["data"]["cluster.toml"]
    config = cluster_config(**msgspec.toml.decode(text))
    assert not (config.insecure_network or config.http.api_key)
    assert "kubectl create secret generic tandem-api-keys --from-file=api_keys=" in GUIDE
    is_ray = any(ray_cluster(document) for document in deployment)
    assert bool(config.network_keys) is is_ray
    secrets_of: dict[str, set[str]] = {}
    for document in deployment:
        for template in pod_templates(document):
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            mounted = {mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
            assert (str(Path(config.http.api_keys_file).parent) in mounted) is (component != "worker")
            assert (config.network_keys in mounted) is is_ray
            for volume in template["spec"]["volumes"]:
                if volume["name"] == "network-keys":
                    items = {item["key"]: item["path"] for item in volume["secret"]["items"]}
                    assert all(key == path for key, path in items.items())
                    assert {f"{part}.key" for part in PARTS} <= set(items)
                    secrets_of[component] = {key for key in items if key.endswith("_secret")}
    if is_ray:
        assert secrets_of == {
            "head": {"proxy.key_secret", "operator.key_secret"},
            "worker": {"worker.key_secret"},
        }


@pytest.mark.parametrize(("deployment", "template"), PODS)
def test_other_pods_reach_only_http(deployment: list[Document], template: Document) -> None:
    labels = template["metadata"]["labels"]
    selecting = [each["spec"] for each in named(deployment, "NetworkPolicy").values()]
    selecting = [spec for spec in selecting if selects(spec["podSelector"], labels)]
    assert {kind for spec in selecting for kind in spec["policyTypes"]} == {"Ingress", "Egress"}
    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tandem"}}}
    open_ports: set[str] = set()
    for rule in (rule for spec in selecting for rule in spec["ingress"]):
        if rule.get("from") == [own]:
            continue
        ports = {port["port"] for port in rule["ports"]}  # a rule without ports would admit all
        if "from" in rule:
            [peer] = rule["from"]
            assert peer["namespaceSelector"]["matchLabels"] and peer["podSelector"]["matchLabels"]
            assert ports == {"dashboard"}
        else:
            open_ports |= ports
    assert open_ports == (set() if labels["app.kubernetes.io/component"] == "worker" else {"http"})
    declared = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert {declared[port] for port in open_ports} <= {8000}


@pytest.mark.parametrize(("deployment", "template"), PODS)
def test_pods_reach_no_private_address_but_each_other_and_dns(deployment: list[Document], template: Document) -> None:
    blocks: dict[str, set[str]] = {}
    for policy in named(deployment, "NetworkPolicy").values():
        if selects(policy["spec"]["podSelector"], template["metadata"]["labels"]):
            for rule in policy["spec"].get("egress", []):
                for peer in rule["to"]:
                    if "ipBlock" in peer:
                        blocks[peer["ipBlock"]["cidr"]] = set(peer["ipBlock"]["except"])
                        assert {port["port"] for port in rule["ports"]} == {80, 443}
                    else:
                        assert peer["podSelector"]["matchLabels"]
    assert blocks["0.0.0.0/0"] >= {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"}
    assert blocks["::/0"] >= {"fc00::/7", "fe80::/10"}


@pytest.mark.parametrize(("deployment", "template"), PODS)
def test_evictions_are_limited(deployment: list[Document], template: Document) -> None:
    budgets = [each["spec"] for each in named(deployment, "PodDisruptionBudget").values()]
    [budget] = [spec for spec in budgets if selects(spec["selector"], template["metadata"]["labels"])]
    if any(ray_cluster(document) for document in deployment):
        # Kubernetes does not know how many pods a RayCluster should have, so it takes only a number of pods that stay.
        assert budget["minAvailable"] >= 1
    else:
        assert budget["maxUnavailable"] == 1


@pytest.mark.parametrize("deployment", ALL)
def test_the_service_leads_to_the_proxies(deployment: list[Document]) -> None:
    [service] = named(deployment, "Service").values()
    selected = [
        template
        for document in deployment
        for template in pod_templates(document)
        if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ]
    assert len(selected) == 1
    has_several_pods = any(each["kind"] == "Deployment" and each["spec"]["replicas"] > 1 for each in deployment)
    affinity = service["spec"].get("sessionAffinity", "None")
    assert affinity == ("ClientIP" if has_several_pods else "None"), "a stored response is in one of the pods"
    [port] = service["spec"]["ports"]
    assert port["targetPort"] in {each["name"] for each in selected[0]["spec"]["containers"][0]["ports"]}
