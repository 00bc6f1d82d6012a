"""A Java virtual machine with the jars of Pulsar or RocketMQ, called through py4j.

It needs no compilation and no further download. Programs of pages are compiled in it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from sandbox import builds, toolchain, versions

_COMPILER = "janino", "commons-compiler"
"""Jars of Spark that compile Java: a Java runtime has no compiler."""
_QUICK_TO_START = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


@contextmanager
def virtual_machine(
    version: str = versions.PULSAR, *, jars: Path | None = None
) -> Iterator[JavaGateway]:
    """Run a Java with the classes of a release of Pulsar, or of *jars*, until the block ends."""
    spark = Path(sysconfig.get_path("purelib")) / "pyspark" / "jars"
    compiler = [str(jar) for name in _COMPILER for jar in spark.glob(f"{name}-[0-9]*.jar")]
    port, token = launch_gateway(
        classpath=":".join([f"{jars or builds.pulsar(version) / 'lib'}/*", *compiler]),
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
