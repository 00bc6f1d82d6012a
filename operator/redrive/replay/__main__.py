"""The application that a SparkApplication names: `spark-submit …/redrive/replay/__main__.py JOB`.

Its one argument is what `ReplayJob.encode` wrote. It fails with the reason as its last line.
"""

from __future__ import annotations

import logging
import sys

from redrive.replay import job, query
from redrive.replay.progress import Progress
from redrive.replay.spec import ReplayJob


def main(arguments: list[str]) -> None:
    """Run one replay."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    replay = ReplayJob.decode(arguments[0] if len(arguments) == 1 else "")
    with query.session(replay) as spark:
        job.run(replay, spark, Progress(replay))


if __name__ == "__main__":
    main(sys.argv[1:])
