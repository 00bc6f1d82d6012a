"""Java of pages: its programs, compiled as they are, and the commands of `pulsar-admin`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from py4j.java_gateway import JavaGateway

from redrive.policy.envelope import CAUSE_TYPE
from sandbox.pulsar import SUPERUSER
from tests.support.documented import CONSUMER_METRICS, JAVA, READ, RUNBOOKS, block, command_lines
from tests.support.java import JavaClient
from tests.support.provisioned_policy import ProvisionedPolicy

pytestmark = [
    pytest.mark.xdist_group("java"),
    pytest.mark.usefixtures("pulsar_namespace"),  # which they change or name
]
JAVA_RELEASE = 8  # the newest that the compiler knows well enough
PROGRAM = """
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.admin.cli.PulsarAdminTool;
import org.apache.pulsar.client.api.*;

public class Program {
    void handle(Message message) throws IOException {
        throw new IOException("no answer");
    }

    public void retry(PulsarClient client) throws Exception {
        RETRY
        consumer.close();
    }

    public void retryWithCause(PulsarClient client) throws Exception {
        CAUSE
        consumer.close();
    }

    public String administer(Properties client, String[] arguments) throws Exception {
        PrintStream before = System.out;
        ByteArrayOutputStream output = new ByteArrayOutputStream();
        System.setOut(new PrintStream(output));
        try {
            if (!new Tool(client).perform(arguments)) throw new IOException(output.toString());
        } finally {
            System.setOut(before);
        }
        return output.toString();
    }
}

class Tool extends PulsarAdminTool {
    Tool(Properties client) throws Exception {
        super(client);
    }

    boolean perform(String[] arguments) {
        return run(arguments);
    }
}
"""


@pytest.fixture
def provisioned(provision_policy: Callable[..., Any]) -> ProvisionedPolicy:
    policy: ProvisionedPolicy = provision_policy()
    return policy


@pytest.fixture
def program(java: JavaGateway, provisioned: ProvisionedPolicy) -> Any:  # noqa: ANN401  of Java
    """The programs of the page, for the topics of the policy."""
    retry = block(JAVA, "Lines to paste", "java")
    cause = block(JAVA, "Record a cause", "java").strip()
    last = "consumer.reconsumeLater(message, 10, TimeUnit.SECONDS);"
    assert last in retry
    code = PROGRAM.replace("RETRY", retry).replace("CAUSE", retry.replace(last, cause))
    code = code.replace("persistent://shop/prod/orders", str(provisioned.policy.topic))
    compiler = java.jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setSourceVersion(JAVA_RELEASE)
    compiler.setTargetVersion(JAVA_RELEASE)
    compiler.cook(code)
    kind = compiler.getClassLoader().loadClass("Program")
    nothing = [java.new_array(getattr(java.jvm.java.lang, name), 0) for name in ("Class", "Object")]
    return kind.getDeclaredConstructor(nothing[0]).newInstance(nothing[1])


def test_programs_of_the_page_retry_and_record_a_cause(
    program: Any,  # noqa: ANN401  of Java
    java: JavaGateway,
    provisioned: ProvisionedPolicy,
) -> None:
    provisioned.send(b"1")
    client = JavaClient(
        java, provisioned.broker.service_url, provisioned.broker.token(provisioned.role)
    )
    program.retry(client.pulsar)
    provisioned.send(b"2")
    program.retryWithCause(client.pulsar)
    client.close()
    reader = provisioned.client(SUPERUSER).create_reader(
        str(provisioned.policy.retry_topic), pulsar.MessageId.earliest
    )
    retries = [reader.read_next(60_000) for _ in range(2)]
    causes = {retry.data(): retry.properties().get(CAUSE_TYPE) for retry in retries}
    assert causes == {b"1": None, b"2": "IOException"}
    assert provisioned.backlog(provisioned.policy.topic) == 0


def test_commands_of_pulsar_admin_in_pages_run(
    program: Any,  # noqa: ANN401  of Java
    java: JavaGateway,
    provisioned: ProvisionedPolicy,
) -> None:
    broker, policy = provisioned.broker, provisioned.policy
    properties = java.jvm.java.util.Properties()
    for name, value in {
        "webServiceUrl": broker.admin_url,
        "brokerServiceUrl": broker.service_url,
        "authPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
        "authParams": f"token:{broker.token(SUPERUSER)}",
    }.items():
        properties.setProperty(name, value)
    names = {
        "PULSAR_NAMESPACE": policy.topic.namespace_name,
        "TOPIC": str(policy.topic),
        "RETRY_TOPIC": str(policy.retry_topic),
        "DEAD_LETTER_TOPIC": str(policy.dead_letter_topic),
        "persistent://shop/prod/orders": str(policy.topic),
        "persistent://shop/prod/orders-fulfilment-DLQ": str(policy.dead_letter_topic),
    }
    provisioned.send(b"a dead letter", topic=policy.dead_letter_topic)
    outputs = {}
    shown = command_lines(*RUNBOOKS, CONSUMER_METRICS, READ)
    for line in sorted(line for line in shown if line.startswith("pulsar-admin ")):
        *words, name = shlex.split(line.partition(" #")[0])[1:]
        words.append(names[name])
        arguments = java.new_array(java.jvm.java.lang.String, len(words))
        for index, word in enumerate(words):
            arguments[index] = word
        outputs[words[1]] = program.administer(properties, arguments)
    assert {"peek-messages", "stats", "stats-internal"} <= outputs.keys()
    assert "a dead letter" in outputs["peek-messages"]
