"""The Go program of the page, built as it is, retries and dead-letters at a real broker."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from redrive.policy.envelope import CAUSE_MESSAGE, CAUSE_TYPE
from sandbox import builds
from tests.support.documented import GO, blocks
from tests.support.provisioned_policy import ProvisionedPolicy, provision_policy

__all__ = ["provision_policy"]
PROGRAM = """
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

func handle(message pulsar.Message) error {
	if string(message.Payload()) == "bad" {
		return errors.New("no stock")
	}
	fmt.Println("handled", string(message.Payload()))
	return nil
}

func run(ctx context.Context, client pulsar.Client) error {
SUBSCRIBE
	if err != nil {
		return err
	}
	for {
RECEIVE
	}
}

func main() {
	token := pulsar.NewAuthenticationToken(os.Getenv("TOKEN"))
	options := pulsar.ClientOptions{URL: os.Getenv("URL"), Authentication: token}
	client, err := pulsar.NewClient(options)
	if err != nil {
		panic(err)
	}
	panic(run(context.Background(), client))
}
"""


@pytest.fixture(scope="session")
def program() -> str:
    """The program, built once for all runs: its topics and its token are in the environment."""
    subscribe, receive = (block.text for block in blocks(GO, language="go"))
    names = re.compile(r'"persistent://shop/prod/orders([^"]*)"')
    subscribe, count = names.subn(r'os.Getenv("TOPIC") + "\1"', subscribe)
    assert count == 3
    assert "10*time.Second" in receive
    receive = receive.replace("10*time.Second", "time.Second")
    code = PROGRAM.replace("SUBSCRIBE", subscribe).replace("RECEIVE", receive)
    return str(builds.go_program(code))


@pytest.mark.timeout(900)  # the first build
def test_go_program_of_the_page_records_the_cause(
    program: str, provision_policy: Callable[..., Any]
) -> None:
    provisioned: ProvisionedPolicy = provision_policy(max_retries=3)
    broker, topic = provisioned.broker, str(provisioned.policy.topic)
    environment = {
        "URL": broker.service_url,
        "TOKEN": broker.token(provisioned.role),
        "TOPIC": topic,
    }
    provisioned.send(b"bad", b"good")
    with subprocess.Popen([program], env=environment, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "handled good\n"
            [dead] = provisioned.dead_letters(1)
        finally:
            running.kill()
    assert dead.data() == b"bad"
    assert dead.properties()[CAUSE_TYPE] == "*errors.errorString"
    assert dead.properties()[CAUSE_MESSAGE] == "no stock"
