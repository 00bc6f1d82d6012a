"""The documented combinations of the chart's values."""

from __future__ import annotations

from typing import Any

IMAGE: dict[str, Any] = {"image": {"registry": "registry.test"}}
DIGEST = f"sha256:{'0' * 64}"
TOKEN = 'a "token": #'  # noqa: S105  to be quoted
PODS = "configure the pods further"
COMBINATIONS: dict[str, dict[str, Any]] = {
    "serve all namespaces": {},
    "serve only some namespaces, by a Role in each": {
        "namespaces": ["default"],
        "clusterId": "ours",
    },
    "install it without cluster-wide rights": {
        "namespaces": ["default"],
        "clusterId": "ours",
        "crds": {"install": False},
        "rbac": {"aggregate": False},
        "admissionPolicy": {"create": False},
    },
    "run no Replays and no Inspections, and have no rights to Jobs and SparkApplications": {
        "replay": {"enabled": False}
    },
    "read Secrets in some namespaces only": {"rbac": {"secretNamespaces": ["default"]}},
    "prepare namespaces for Replays": {
        "imagePullSecrets": [{"name": "registry"}],
        "replay": {
            "namespaces": ["default", "kube-public"],
            "image": {"repository": "job", "digest": DIGEST},
            "secret": {"token": TOKEN, "usableBy": ["platform/main"]},
        },
    },
    "set the size and placement of the pods of Replays": {
        "replay": {"maxExecutors": 20},
        "jobTemplates": {
            "large": {
                "namespaces": {"names": ["default"]},
                "executors": 2,
                "driver": {"spec": {"securityContext": {"runAsUser": 1_000_700_000}}},
                "executor": {"spec": {"tolerations": [{"operator": "Exists"}]}},
            }
        },
    },
    "run Replays by both Spark operators": {
        "replay": {"launchers": {"apache": True}},
    },
    "run Replays by Apache's Spark operator alone": {
        "replay": {"launchers": {"apache": True, "kubeflow": False}},
    },
    "let the Prometheus operator scrape the pods, with alerts and dashboards": {
        "podMonitor": {
            "enabled": True,
            "interval": "30s",
            "scrapeTimeout": "10s",
            "honorLabels": True,
            "relabelings": [{"targetLabel": "cluster", "replacement": "east"}],
            "metricRelabelings": [
                {"action": "drop", "sourceLabels": ["__name__"], "regex": "python_.*"}
            ],
            "annotations": {"a.test/b": "c"},
            "labels": {"release": "prometheus"},
            "namespace": "default",
        },
        "prometheusRule": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "namespace": "default",
        },
        "dashboard": {
            "enabled": True,
            "annotations": {"grafana_folder": "Pulsar"},
            "namespace": "default",
        },
    },
    "let the Prometheus operator scrape the Service": {"serviceMonitor": {"enabled": True}},
    "limit connections to and from the pods": {
        "networkPolicy": {
            "enabled": True,
            "ingress": [{"from": [{"namespaceSelector": {}}], "ports": [{"port": "http"}]}],
        },
    },
    "install further objects with the release": {
        "extraObjects": [
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-a'}",
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Chart.Name }}-b"}},
        ],
    },
    PODS: {
        "image": {"registry": "registry.test", "digest": DIGEST},
        "fullnameOverride": "retries",
        "nameOverride": "retry",
        "replicas": 3,
        "logFormat": "text",
        "podAnnotations": {"a.test/b": "c"},
        "podLabels": {"team": "shop"},
        "commonLabels": {"owner": "platform", "team": "platform"},
        "deploymentAnnotations": {"a.test/b": "c"},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "50%"}},
        "revisionHistoryLimit": 3,
        "terminationGracePeriodSeconds": 60,
        "extraArgs": ["--replay-launcher=Kubeflow"],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        "livenessProbe": {"failureThreshold": 5},
        "readinessProbe": {"periodSeconds": 10},
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["pulsar"]}],
        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
        "runtimeClassName": "gvisor",
        "logLevel": "debug",
        "extraEnv": [
            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "priorityClassName": "system-cluster-critical",
        "credentials": {"volume": {"csi": {"driver": "secrets-store.csi.k8s.io"}}},
        "endpoint": {"address": "[::]", "port": 9090},
        "service": {"port": 80, "annotations": {"a.test/b": "c"}},
        "podDisruptionBudget": {"maxUnavailable": "50%"},
        "podSecurityContext": {"runAsUser": 1234, "fsGroup": 1234},
        "securityContext": {"runAsGroup": 1234, "privileged": False},
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "DoNotSchedule",
            },
        ],
        "serviceAccount": {
            "name": "ours",
            "annotations": {"a.test/role": "b"},
            "labels": {"a.test/b": "c"},
            "automount": False,
        },
    },
    "install as little as possible, for a trial": {
        "replicas": 1,
        "service": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False, "name": "ours"},
        "topologySpreadConstraints": [],
    },
}
"""Purpose in the installation guide → the values to set for it, and others that suit them."""
