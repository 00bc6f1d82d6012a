"""A stand-in for the Spark operators of Kubeflow and Apache, which no package registry has.

It watches SparkApplications (sparkoperator.k8s.io/v1beta2 and spark.apache.org/v1) and runs each as
`spark-submit --master local[…]`, for machines without containers. It also runs the command of Jobs,
whose pods need a kubelet. In a cluster, `in_cluster` runs SparkApplications in pods.

It is an independent program: the sandbox installs its CRDs and starts it as a process. It imports
only its own modules, the Kubernetes client and the standard library. The code that writes
SparkApplications therefore meets the real API, and shares no assumption with the stand-in.
"""

from __future__ import annotations

from pathlib import Path

CRD = Path(__file__).with_name("crd.yaml")
"""The CustomResourceDefinitions to install before the stand-in starts."""
