"""A stand-in for the Spark operators of Kubeflow and Apache, which no registry of packages has.

It watches SparkApplication objects (sparkoperator.k8s.io/v1beta2 and spark.apache.org/v1) and runs
each as `spark-submit --master local[…]` from the object alone, for machines without containers; in
a cluster, `in_cluster` runs each of the first API in pods. It is a program of its own: the sandbox
installs its CRDs and starts it as a process, and it imports nothing but its own modules, the
Kubernetes client and the standard library, so that whoever writes SparkApplications meets the real
API and never a shared assumption.
"""

from __future__ import annotations

from pathlib import Path

CRD = Path(__file__).with_name("crd.yaml")
"""The CustomResourceDefinitions to install before the stand-in starts."""
