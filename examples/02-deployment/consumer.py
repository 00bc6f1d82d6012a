"""Handle messages with `RetryConsumer`, in a pod. Those that say `bad` fail.

The policy is mounted at /etc/redrive, from the ConfigMap that the operator makes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pulsar

from redrive import PolicyFile, RetryConsumer


def handle(message: pulsar.Message) -> None:
    """Print a message, or fail."""
    text = message.data().decode()
    if text.startswith("bad"):
        error = f"cannot handle {text}"
        raise ValueError(error)
    print(f"handled {text}", flush=True)  # noqa: T201  its log


def main() -> None:
    """Consume until SIGTERM, then finish the in-flight messages."""
    token = Path(os.environ["PULSAR_TOKEN_FILE"]).read_text(encoding="ascii").strip()
    client = pulsar.Client(os.environ["PULSAR_URL"], pulsar.AuthenticationToken(token))
    with RetryConsumer(client, PolicyFile()) as consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        consumer.run(handle)
    client.close()


if __name__ == "__main__":
    main()
