"""A Java virtual machine with the jars of a Pulsar distribution, called through py4j.

It needs no compilation and no further download.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from sandbox import builds, toolchain, versions

_QUICK_TO_START = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


@contextmanager
def virtual_machine(version: str = versions.PULSAR) -> Iterator[JavaGateway]:
    """Run a Java with the classes of a release of Pulsar until the block ends."""
    port, token = launch_gateway(
        classpath=f"{builds.pulsar(version)}/lib/*",
        java_path=str(toolchain.java_home() / "bin" / "java"),
        javaopts=_QUICK_TO_START,
        enable_auth=True,
        die_on_exit=True,  # also if this process is killed
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token))
    try:
        yield gateway
    finally:
        gateway.shutdown()
