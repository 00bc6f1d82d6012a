"""Authenticated evidence of Replays: records of a ledger, and messages in a target. Pure.

Roles besides the jobs of a policy may be able to produce to its ledger and to its targets: those
with rights on a whole Pulsar namespace, applications, and jobs of other namespaces, which have the
same replay role. So each record and each moved message carries a code that only the holders of a
key can compute. Each ledger has a key of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from redrive.policy.naming import TopicName

KEY_BYTES = 32
"""Length of a key."""
OWNER = "redrive-owner"
KEY = "redrive-key"
NUMBER = "redrive-number"
CODE = "redrive-code"
"""Properties of each record in a ledger topic: see `SignedRecord`, and the code of all of it."""
_CODE_DIGITS = 32
_NUMBER = re.compile(r"[0-9]{1,18}")


class SignedRecord(NamedTuple):
    """A record of a ledger, as its writer signs it.

    Attributes:
        key: key of the record, see `Records`.
        value: JSON; empty to remove the record.
        owner: run that wrote it.
        number: higher than the numbers of all records before it, so a copy of an older record is
            recognized; 0 in the first record of a run, which has not read the ledger yet.
    """

    key: str
    value: bytes
    owner: str
    number: int


@dataclass(frozen=True)
class LedgerKey:
    """The key of one ledger.

    Attributes:
        secret: known to the operator and to jobs of the policy that the ledger belongs to.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def derive(cls, master: bytes, namespace: str, ledger: str) -> LedgerKey:
        """Return the key of the topic *ledger* for policies of a Kubernetes namespace.

        Another namespace may have a topic of that name at another broker, and its users may read
        the key.
        """
        return cls(hmac.digest(master, _joined("ledger", namespace, ledger), hashlib.sha256))

    @property
    def id(self) -> str:
        """Return text that identifies the key, and from which it cannot be computed."""
        return self._code("id")

    def topic_key(self, key: str) -> str:
        """Return the message key of a record, which compaction goes by.

        No role without the key of the ledger can compute it, so no other message replaces a record.
        """
        return self._code("key", key)

    def properties(self, record: SignedRecord) -> dict[str, str]:
        """Return the properties with which a record is stored."""
        return {
            OWNER: record.owner,
            KEY: record.key,
            NUMBER: str(record.number),
            CODE: self._code_of(record),
        }

    def verify(
        self, topic_key: str, value: bytes, properties: Mapping[str, str]
    ) -> SignedRecord | None:
        """Return a record that was signed with this key; None for any other message.

        Args:
            topic_key: message key.
            value: content of the message.
            properties: properties of the message.
        """
        number = properties.get(NUMBER, "")
        if not _NUMBER.fullmatch(number):
            return None
        record = SignedRecord(
            properties.get(KEY, ""), value, properties.get(OWNER, ""), int(number)
        )
        is_signed = _equal(properties.get(CODE, ""), self._code_of(record))
        return record if is_signed and topic_key == self.topic_key(record.key) else None

    def proof(self, source: str, target: TopicName | str) -> str:
        """Return the code of a message that was moved.

        Args:
            source: its `Source`, as text.
            target: topic that it was moved to, without a partition; the name of one of RocketMQ.
        """
        return self._code("moved", source, str(target))

    def proves(self, proof: str, source: str, target: TopicName | str) -> bool:
        """Return True if *proof* is the code of a message that was moved; see `proof`."""
        return _equal(proof, self.proof(source, target))

    def producer_name(self, source: str, renamed: int, index: int) -> str:
        """Return the name of the producer that sends messages of a range to one partition.

        Args:
            source: dead-letter topic and range.
            renamed: see `RangeRecord.renamed`.
            index: partition of the target.
        """
        return f"redrive-replay-{self._code('producer', source, str(renamed), str(index))}"

    def _code_of(self, record: SignedRecord) -> str:
        return self._code("record", record.key, record.value, record.owner, str(record.number))

    def _code(self, *parts: str | bytes) -> str:
        return hmac.digest(self.secret, _joined(*parts), hashlib.sha256).hex()[:_CODE_DIGITS]


def _joined(*parts: str | bytes) -> bytes:
    """Join *parts* so that no other parts give the same bytes."""
    encoded = [
        part if isinstance(part, bytes) else part.encode(errors="surrogatepass") for part in parts
    ]
    return b"".join(len(part).to_bytes(8) + part for part in encoded)


def _equal(text: str, code: str) -> bool:
    return hmac.compare_digest(text.encode(errors="surrogatepass"), code.encode())
