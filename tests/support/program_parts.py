"""Parts of programs that run as processes, and do not import the tests."""

from __future__ import annotations

SILENT = """
from redrive.replay.job.plan import DesiredState

class Silent:
    def take_over(self, token):
        pass

    def rate_limit(self, job):
        return job.rate_limit

    def report(self, account, *, pause=None):
        return DesiredState.RUN

    def report_scan(self, scanned):
        pass
"""
"""A `Reporter` that ignores its reports: `Silent()`."""

PEAK = r"""
import re
from pathlib import Path

def peak():  # what `resource` tells includes that of the process which has started this one
    kibibytes = re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]
    return int(kibibytes) // 1_024
"""
"""The peak memory of this process: `peak()`, in MiB."""
