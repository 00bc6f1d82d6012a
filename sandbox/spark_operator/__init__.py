"""A stand-in for the Kubeflow Spark operator, for machines without containers.

It watches SparkApplication objects (sparkoperator.k8s.io/v1beta2) and runs each as
`spark-submit --master local[…]` from the object alone. It is a program of its own: the sandbox
installs its CRD and starts it as a process, and it imports nothing but its own modules, the
Kubernetes client and the standard library, so that whoever writes SparkApplications meets the real
API and never a shared assumption.
"""

from __future__ import annotations

from pathlib import Path

CRD = Path(__file__).with_name("crd.yaml")
"""The CustomResourceDefinition to install before the stand-in starts."""
