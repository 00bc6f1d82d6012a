"""The driver of one submission as a process, without a pod and a kubelet.

Started by a keeper through `Machine`. Its environment comes from the object and from the variables
that replace an image. Its output goes to `<work-dir>/<namespace>/<pod>.log`; its other files are
deleted at its end.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import command, environment, mounts
from .clock import now
from .cluster import Cluster
from .errors import GoneError, MissingConfigError, RefusedError, UnavailableError
from .lifecycle import Observation, Phase
from .objects import Application
from .process import Process
from .runner import Submission

PROPERTIES = "spark.properties"
KUBECONFIG = "kubeconfig"

# The interval at which a pod without its Secret or ConfigMap reads again.
CONFIG_RETRY_SECONDS = 2

# Logged when the SparkContext has its executor; before that the JVM is starting.
_RUNNING = b"Starting executor ID driver"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """A runner whose drivers are processes of this machine.

    Args:
        cluster: the source of drivers' tokens.
        image: environment variables that replace a container image; PATH must have spark-submit.
        work_dir: folder for the logs and files of drivers.
    """

    cluster: Cluster
    image: Mapping[str, str]
    work_dir: Path

    async def submit(self, app: Application) -> Submission:
        """Accept *app*; its driver starts with `Submission.follow`.

        The status therefore records the submission before the driver runs: after a restart the
        driver is lost, and the application does not run twice.

        Raises:
            RefusedError: a field is not supported here, or the ServiceAccount does not exist.
        """
        command.check(app)
        kubeconfig = await self.cluster.driver_kubeconfig(app)
        application_id = f"spark-{uuid.uuid4().hex}"
        conf = command.properties(app, application_id)
        files = {PROPERTIES: command.properties_file(conf), KUBECONFIG: kubeconfig}
        return Submission(application_id, lambda on_change: Pod(app, files, self, on_change))


class Pod:
    """The running driver of *app*; calls *on_change* when `observation` changes."""

    def __init__(
        self,
        app: Application,
        files: Mapping[str, str],
        machine: Machine,
        on_change: Callable[[], None],
    ) -> None:
        self.observation = Observation(Phase.PENDING)
        self._app = app
        self._files = files
        self._cluster = machine.cluster
        self._machine = machine
        self._on_change = on_change
        namespace = machine.work_dir / app.namespace
        self._folder = namespace / app.driver_pod
        self._log = namespace / f"{app.driver_pod}.log"
        self._record = namespace / f"{app.driver_pod}.pid"
        self._process: Process | None = None
        self._life = asyncio.create_task(self._live())

    async def stop(self) -> None:
        """Stop the driver and its processes, and remove its files except the log."""
        if self._process is None:
            self._life.cancel()
        else:
            await self._process.stop()
        await asyncio.wait([self._life])

    async def _live(self) -> None:
        try:
            variables, mounted = await self._configuration()
            self._become(await self._run(variables, mounted))
        except RefusedError as error:
            self._become(_not_started(error))
        except Exception as error:
            # A failure of this driver does not stop the others.
            log.exception("%s/%s does not start", self._app.namespace, self._app.name)
            self._become(_not_started(error))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _configuration(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the environment and the mounted files; wait, as a pod does, until all exist."""
        shown = ""
        while True:
            try:
                sources = environment.references(self._app) | mounts.references(self._app)
                data = await self._cluster.data(self._app.namespace, sources)
                return environment.resolve(self._app, data), mounts.files(self._app, data)
            except (MissingConfigError, UnavailableError) as error:
                if shown != str(error):
                    shown = str(error)
                    await self._complain(shown)
            await asyncio.sleep(CONFIG_RETRY_SECONDS)

    async def _complain(self, message: str) -> None:
        log.warning("%s/%s waits: %s", self._app.namespace, self._app.name, message)
        try:
            await self._cluster.warn(self._app, message, now())
        except (GoneError, UnavailableError) as error:
            log.warning("no Event was recorded: %s", error)

    async def _run(self, variables: Mapping[str, str], mounted: Mapping[str, str]) -> Observation:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        root = self._folder / "mounts"
        root.mkdir(mode=0o700)
        for path, content in mounted.items():
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        for name, content in self._files.items():
            (self._folder / name).write_text(content)
        with self._log.open("wb") as written:

            def on_line(line: bytes) -> None:
                written.write(line + b"\n")
                written.flush()
                if _RUNNING in line and self.observation.phase is Phase.PENDING:
                    self._become(Observation(Phase.RUNNING))

            env = {**self._image(), **mounts.environment(variables, self._app, root)}
            self._process = await Process.start(
                self._command(env),
                env=env,
                folder=self._folder,
                record=self._record,
            )
            if "program" in self._app.spec:
                self._become(Observation(Phase.RUNNING))
            code = await self._process.run(on_line)
        if code == 0:
            return Observation(Phase.SUCCEEDED)
        # Without a cause, like the real operator, which does not read the log.
        reason = f"driver container failed with ExitCode: {code}, Reason: Error"
        return Observation(Phase.FAILED, reason)

    def _command(self, env: Mapping[str, str]) -> list[str]:
        if program := self._app.spec.get("program"):  # of a Job
            words = [environment.expanded(word, env) for word in program]
            return [self._found(words[0]), *words[1:]]
        arguments = command.arguments(self._app, self._folder / PROPERTIES, env)
        return [self._found("spark-submit"), *arguments]

    def _found(self, name: str) -> str:
        path = self._machine.image.get("PATH", "")
        program = shutil.which(name, path=path)
        if program is None:
            msg = f"no {name} on the image's PATH; got {path!r}"
            raise RefusedError(msg)
        return program

    def _image(self) -> dict[str, str]:
        return {
            **self._machine.image,
            # In a pod: its address, its scratch volume and its mounted token.
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._folder / "scratch"),
            "KUBECONFIG": str(self._folder / KUBECONFIG),
        }

    def _become(self, observation: Observation) -> None:
        self.observation = observation
        self._on_change()


def _not_started(error: Exception) -> Observation:
    return Observation(Phase.FAILED, f"driver container did not start: {error}")
