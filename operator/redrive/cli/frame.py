"""Frame of the commands that use click: the group, shared options, exit codes.

A command is declared as

```python
@click.command()
@click.argument("policy")
@cluster_options
def status(policy: str, flags: ClusterFlags) -> int | None: ...
```

and returns its exit code, None for 0. Output goes through `redrive.cli.output`, requests through
`redrive.cli.cluster`; both are imported by the command that uses them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from redrive.api import Body
from redrive.cli.kubeconfig import ImpersonatedName
from redrive.cli.main import COMMANDS, COMPLETION_VARIABLE, overview, program_name
from redrive.cli.output import output_option, print_object

USAGE = 2
"""Exit code of wrong usage, and of a confirmation that is missing."""
HAS_FINDINGS = 3
"""Exit code of a command that is done, but messages were refused, or a check found something."""
NOT_FINISHED = 4
"""Exit code of a wait that is over before its end."""

COMPLETION_SECONDS = 1.0
"""Time limit of a request for names, which a shell waits for."""
KUBECTL_COMPLETION = "__complete"
"""Hidden command that answers kubectl."""

DEFAULT_NAMESPACE = "default"
_FILE_ENDINGS = (".yaml", ".yml", ".json")
NAME_WITHOUT_FILE = (
    "NAME selects one of several policies in a file; POLICY is not a file: leave NAME out"
)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""Type of an option that names a file to read."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Commands(click.Group):
    """The group of all commands of the table, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        del ctx
        return [name for name, command in COMMANDS.items() if command.extra == "cli"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None for an unknown name."""
        del ctx
        if cmd_name not in COMMANDS or COMMANDS[cmd_name].extra != "cli":
            return None
        module = import_module(f"redrive.cli.{COMMANDS[cmd_name].module}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def get_help(self, ctx: click.Context) -> str:
        """Return the overview, which imports no command."""
        del ctx
        return overview()


COMMAND_GROUP = Commands("redrive", context_settings={"help_option_names": ["-h", "--help"]})


def run(arguments: Sequence[str]) -> int:
    """Run the command that *arguments* begin with; return its exit code.

    Raises:
        RedriveError: it failed.
        KeyboardInterrupt: it was interrupted.
    """
    if arguments[:1] == [KUBECTL_COMPLETION]:
        return int(import_module("redrive.cli.installation").complete(list(arguments[1:])))
    try:
        code = COMMAND_GROUP.main(
            list(arguments),
            prog_name=program_name(),
            complete_var=COMPLETION_VARIABLE,
            standalone_mode=False,
        )
    except click.UsageError as error:
        _complain(error.format_message())
        if error.ctx is not None:
            _complain(f"help: {error.ctx.command_path} --help", prefix="")
        return USAGE
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # the reader of a pipe has enough
        sys.stderr.close()
        return 1
    return code if isinstance(code, int) else 0


def _complain(text: str, prefix: str = "error: ") -> None:
    click.echo(f"{prefix}{text}", err=True)


@dataclass(frozen=True)
class ClusterFlags:
    """Flags that kubectl has as well, as they were given.

    Attributes:
        namespace: None for that of the context.
        context: of the kubeconfig; None for the current one.
        kubeconfig: path of the file; None for `KUBECONFIG`, else `~/.kube/config`.
        user: to impersonate.
        groups: to impersonate.
        timeout_seconds: of one request; 0 for no limit, as of kubectl.
        is_verbose: True to show each request.
        all_namespaces: with `-A`.
    """

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None
    user: str | None = None
    groups: tuple[str, ...] = ()
    timeout_seconds: float = 30.0
    is_verbose: bool = False
    all_namespaces: bool = False

    def hint(self, *words: str, namespace: str | None = None) -> str:
        """Return a command line of this program that can be pasted, for the same cluster.

        Args:
            words: of the command line.
            namespace: of the object; None repeats `-n` as it was given.
        """
        flags = self.words(None if "-A" in words else namespace or self.namespace)
        return shlex.join([*program_name().split(), *words, *flags])

    def words(self, namespace: str | None) -> list[str]:
        """Return the flags for the same cluster and user, also of kubectl, and of a namespace."""
        flags = (
            ("-n", namespace),
            ("--context", self.context),
            ("--kubeconfig", self.kubeconfig),
            ("--as", self.user),
            *(("--as-group", group) for group in self.groups),
        )
        return [word for flag, value in flags if value is not None for word in (flag, value)]


@dataclass(frozen=True)
class WriteFlags(ClusterFlags):
    """Flags of a command that writes one object.

    Attributes:
        dry_run: `client` or `server` to print the object only.
        output: format in which it is printed; None for a line.
    """

    dry_run: str | None = None
    output: str | None = None

    def show(self, body: Body, done: str) -> None:
        """Print *body* in the format, else a line that states what was *done* to it."""
        print_object(body, self.output, done, self.dry_run)


class Seconds(click.ParamType[float]):
    """A duration of kubectl (`30s`, `2m`, `1h`, or plain seconds), converted to seconds."""

    name = "duration"
    _UNITS: Mapping[str, float] = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    _MOST = 10**9
    """Longest duration, so that the current time plus a duration is a time."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a duration."""
        if isinstance(value, int | float):
            return float(value)
        text = str(value)
        number, unit = (text[:-1], text[-1:]) if text[-1:] in self._UNITS else (text, "s")
        try:
            seconds = float(number) * self._UNITS[unit]
        except ValueError:
            seconds = -1
        if not 0 <= seconds <= self._MOST:  # NaN is refused as well
            self.fail(f"{value!r} is no duration; write one like 30s, 2m or 1h", param, ctx)
        return seconds


def cluster_options(function: _Function, kind: type[ClusterFlags] = ClusterFlags) -> _Function:
    """Add kubectl's options to a command, which gets them as its argument `flags`.

    Args:
        function: the command.
        kind: of the flags, with a field for each option.
    """
    names = {field.name for field in fields(kind)}

    @click.option("-n", "--namespace", metavar="NS", help="Namespace; default: of the context.")
    @click.option("--context", metavar="NAME", help="Context of the kubeconfig.")
    @click.option("--kubeconfig", metavar="FILE", help="Default: $KUBECONFIG, ~/.kube/config.")
    @click.option(
        "--as", "user", type=ImpersonatedName(), metavar="USER", help="User to impersonate."
    )
    @click.option(
        "--as-group",
        "groups",
        type=ImpersonatedName(),
        metavar="GROUP",
        multiple=True,
        help="Group to impersonate.",
    )
    @click.option(
        "--request-timeout",
        "timeout_seconds",
        metavar="TIME",
        type=Seconds(),
        default="30s",
        show_default=True,
        help="Time limit of one request.",
    )
    @click.option(
        "-v",
        "--verbose",
        "is_verbose",
        is_flag=True,
        help="Show each request to the API server, on standard error.",
    )
    @wraps(function)
    def command(**arguments: Any) -> Any:  # noqa: ANN401  a command's own arguments
        flags = kind(**{name: arguments.pop(name) for name in names & arguments.keys()})
        return function(flags=flags, **arguments)

    return command  # type: ignore[return-value]


def all_namespaces_option(function: _Function) -> _Function:
    """Add `-A` to a command with `cluster_options`; it stands above them."""
    return click.option("-A", "--all-namespaces", is_flag=True, help="Objects of all namespaces.")(
        function
    )


def write_options(function: _Function) -> _Function:
    """Add the options of a command that writes; it gets them as `flags`, which are WriteFlags."""
    dry_run = click.option(
        "--dry-run",
        type=click.Choice(["client", "server"]),
        help="Print the object and write nothing; `server` has the API server check it.",
    )
    output = output_option("json", "yaml", "name")
    return dry_run(output(cluster_options(function, WriteFlags)))


def names_of(plural: str) -> Callable[..., list[str]]:
    """Return the completion of a name of an object of redrive's kinds; silent on errors."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        cluster_module = import_module("redrive.cli.cluster")
        flags = ClusterFlags(
            namespace=ctx.params.get("namespace"),
            context=ctx.params.get("context"),
            kubeconfig=ctx.params.get("kubeconfig"),
            timeout_seconds=COMPLETION_SECONDS,
        )
        try:
            cluster = cluster_module.Cluster(flags)
            kind = next(k for k in cluster_module.KINDS if k.plural == plural)
            bodies = cluster.list(kind, cluster.namespace)
        except cluster_module.ClusterError:
            return []
        names = [body["metadata"]["name"] for body in bodies]
        return [name for name in names if name.startswith(incomplete)]

    return complete


def policy_argument(function: _Function) -> _Function:
    """Add the argument `policy`, a name that shells complete."""
    return click.argument("policy", shell_complete=names_of("retrypolicies"))(function)


def replay_argument(function: _Function) -> _Function:
    """Add the argument `replay`, a name that shells complete."""
    return click.argument("replay", shell_complete=names_of("replays"))(function)


def is_file(name: str) -> bool:
    """Return True if an argument names a file or folder, and not a policy of the cluster."""
    return name == "-" or "/" in name or name.endswith(_FILE_ENDINGS)
