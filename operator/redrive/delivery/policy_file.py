"""Finds and reads the policy a consumer runs with; called by the user's program at its start."""

from __future__ import annotations

import os
from pathlib import Path

from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy import codec
from redrive.policy.model import Policy

VARIABLE = "REDRIVE_POLICY"
MOUNTED = Path("/etc/redrive/policy.json")
"""Where a pod finds the policy when the operator's ConfigMap is mounted at /etc/redrive."""


class PolicyFileError(RedriveError):
    """There is no policy to be had from a file."""

    reason = "PolicyFile"


def load_policy(path: Path | str | None = None) -> Policy:
    """Read the policy from *path*, else from the file that $REDRIVE_POLICY names, else `MOUNTED`.

    Raises:
        PolicyFileError: the file can't be read, or holds no policy that a consumer could obey.
    """
    file = Path(path or os.environ.get(VARIABLE) or MOUNTED)
    try:
        return codec.decode(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyFileError(
            f"the policy file {file} can't be read",
            got=str(error),
            remedy=f"mount the ConfigMap of the RetryPolicy at {MOUNTED.parent}, "
            f"or name the file as an argument or in ${VARIABLE}",
        ) from error
    except InvalidSpecError as error:
        raise PolicyFileError(
            f"the policy file {file} can't be used: {error}",
            remedy=f"or name another one as an argument or in ${VARIABLE}",
        ) from error
