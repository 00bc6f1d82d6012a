"""`python -m sandbox.spark_operator`: run the stand-in until it is stopped.

Started by the sandbox as a process. SIGTERM or Ctrl-C stops every driver and then the stand-in.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from .cluster import APIS, JOBS, connected
from .controller import Controller, serve
from .pod import Machine
from .process import stop_orphans


def main(arguments: list[str]) -> None:
    """Run the stand-in with the options in *arguments*."""
    chosen = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # All files of the stand-in and of its drivers are readable by their owner only.
    os.umask(0o077)
    work_dir: Path = chosen.work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    stop_orphans(work_dir)
    asyncio.run(_serve(chosen.kubeconfig, dict(chosen.image_env), work_dir, chosen.namespace))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spark-operator", description="Run SparkApplications and Jobs on this machine."
    )
    parser.add_argument(
        "--kubeconfig", type=Path, required=True, help="the API server and its credentials"
    )
    parser.add_argument(
        "--namespace", nargs="+", default=[], help="namespaces to watch; all if left out"
    )
    parser.add_argument(
        "--work-dir", type=Path, required=True, help="folder for the logs and files of drivers"
    )
    parser.add_argument(
        "--image-env",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="environment of drivers in the place of an image; PATH must lead to spark-submit",
    )
    return parser


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        msg = f"not of the form NAME=VALUE; got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return name, value


async def _serve(
    kubeconfig: Path, image: dict[str, str], work_dir: Path, namespaces: list[str]
) -> None:
    async with AsyncExitStack() as stack:
        apis = (*APIS, JOBS)
        clusters = [await stack.enter_async_context(connected(kubeconfig, api)) for api in apis]
        await serve(
            *(
                Controller(cluster, Machine(cluster, image, work_dir), namespaces)
                for cluster in clusters
            )
        )


if __name__ == "__main__":
    main(sys.argv[1:])
