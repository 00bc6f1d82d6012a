"""The application that a SparkApplication names: `spark-submit …/redrive/replay/__main__.py JOB`.

Its one argument is what `ReplayJob.encode` wrote. It fails with the reason as its last line, which
it has written into the status of the Replay as well: a Spark operator passes on an exit code.
"""

from __future__ import annotations

import logging
import sys

from redrive.errors import RedriveError
from redrive.replay.job.progress import Progress
from redrive.replay.job.run import preview, run
from redrive.replay.spark import query
from redrive.replay.spec import ReplayJob

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Run one replay."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    job = ReplayJob.decode(arguments[0] if len(arguments) == 1 else "")
    progress = Progress(job)
    progress.read()  # it stops here if the Replay is gone, or another
    try:
        with query.session(job) as spark:
            engine = query.Spark(spark, job)
            if job.dry_run:
                progress.preview(preview(job, engine))
            else:
                run(job, engine, progress)
    except Exception as error:
        try:
            progress.fail(error)
        except RedriveError:
            logger.exception("the status can't say why the run failed")
        raise
    progress.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
