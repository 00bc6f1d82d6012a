"""Table of the commands, and the start of one.

`redrive COMMAND …`, or `kubectl redrive COMMAND …`: the program is installed under both names, and
prints the one that it was called by.

This module needs nothing that an extra installs, and imports a command when it is called: `--help`
works wherever `redrive` is installed, and no command pays for the imports of another. A command is
one line in `COMMANDS` and one `click.Command` in the module that the line names; see
`redrive.cli.frame` for the options that commands share. `redrive operator` alone reads its
arguments with argparse: it runs without the extra `cli`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from redrive import __version__
from redrive.errors import RedriveError

COMPLETION_VARIABLE = "_REDRIVE_COMPLETE"
"""Environment variable by which a shell asks for completions."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Subcommand:
    """One line of the table of commands.

    Attributes:
        module: module of `redrive.cli` with a `click.Command` that has the name of the command, `_`
            in place of `-`.
        section: heading under which the help lists it.
        summary: one line of help, without a full stop.
        extra: the extra of the package that it needs.
    """

    module: str
    section: str
    summary: str
    extra: str = "cli"


COMMANDS: Mapping[str, Subcommand] = {
    "status": Subcommand("policies", "See", "connections and policies that need attention"),
    "history": Subcommand("policies", "See", "past Replays of a policy, with author and result"),
    "refused": Subcommand("replays", "See", "messages that a Replay did not move, and why"),
    "follow": Subcommand("replay", "See", "progress of a Replay or an Inspection"),
    "doctor": Subcommand("installation", "See", "checks of the installation and of your rights"),
    "version": Subcommand("installation", "See", "versions, and where they differ"),
    "audit": Subcommand("audit", "See", "compare dead letters, ledger and targets of Replays"),
    "keys": Subcommand("keys", "See", "keys that wait for the retry of a message"),
    "causes": Subcommand("inspection", "Read", "count dead letters by cause"),
    "peek": Subcommand("inspection", "Read", "show single dead letters; consumes nothing"),
    "export": Subcommand("inspection", "Read", "write dead letters to a file"),
    "report": Subcommand("inspection", "Read", "write an HTML page with plots"),
    "replay": Subcommand("replay", "Act", "plan, ask, move dead letters, and follow"),
    "suspend": Subcommand("replays", "Act", "suspend a Replay"),
    "resume": Subcommand("replays", "Act", "resume a Replay"),
    "cancel": Subcommand("replays", "Act", "end a Replay before all is moved"),
    "approve": Subcommand("replays", "Act", "approve a Replay of many messages"),
    "reconcile": Subcommand("policy_actions", "Act", "reconcile a policy now; pause or resume it"),
    "ignore-outage": Subcommand("policy_actions", "Act", "retry in spite of an outage, for a time"),
    "dead-letter": Subcommand("policy_actions", "Act", "dead-letter a message at its next failure"),
    "unload": Subcommand("policy_actions", "Act", "have the broker load the retry topic again"),
    "lint": Subcommand("lint", "Develop", "check manifests, without a cluster"),
    "explain": Subcommand("develop", "Develop", "show names, attempts in time and lines to paste"),
    "diff": Subcommand("diff", "Develop", "show the changes that a changed manifest makes"),
    "policy": Subcommand("develop", "Develop", "print the file that consumers mount"),
    "provision": Subcommand("develop", "Develop", "create topics on a broker without an operator"),
    "adopt": Subcommand("adopt", "Develop", "print manifests for retry topics that exist"),
    "rights": Subcommand("develop", "Develop", "show the rights of each role, and missing ones"),
    "completion": Subcommand("installation", "Run", "completion for shells and kubectl"),
    "operator": Subcommand(
        "operator", "Run", "provision policies and run replays, until stopped", extra="operator"
    ),
}
"""All commands by name, in the order in which the help lists them."""


def program_name() -> str:
    """Return the name that the program was called by: `redrive`, or `kubectl redrive`."""
    called = Path(sys.argv[0]).name
    return "kubectl redrive" if called.startswith("kubectl") else "redrive"


def overview() -> str:
    """Return the help of the program, from the table alone."""
    lines = [
        f"Usage: {program_name()} COMMAND [OPTIONS]",
        "",
        "Retry and dead-letter topics for Apache Pulsar on Kubernetes.",
    ]
    width = max(map(len, COMMANDS)) + 2
    for section in dict.fromkeys(command.section for command in COMMANDS.values()):
        lines += ["", f"{section}:"]
        lines += [
            f"  {name:{width}}{command.summary}"
            for name, command in COMMANDS.items()
            if command.section == section
        ]
    first = "For dead letters: status -A, then causes, peek and replay POLICY -n NAMESPACE"
    options = f"Options of a command: {program_name()} COMMAND --help"
    return "\n".join([*lines, "", first, options, f"Version of the program: {__version__}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code.

    0: done. 1: failed, or not permitted. 2: wrong usage, or a confirmation is missing. 3: done, but
    messages were refused, are dead again or are perhaps stored twice, or a check has findings. 4:
    not finished; the message contains the command that continues. 130: interrupted.

    An error that the user can fix is one line on standard error. A reader that closes its end, such
    as `head`, ends the command with code 1, without a message.
    """
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed at the exit
        return 1
    return code


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if COMPLETION_VARIABLE in os.environ:
        name = "complete"  # a shell asks; click answers
    if name in {"-h", "--help", "help", "--version"}:
        text = f"redrive {__version__}" if name == "--version" else overview()
        print(text)  # noqa: T201  what a command answers
        return 0
    try:
        if name == "operator":
            return _run_operator(arguments[1:])
        with signals_as_exits():
            return int(import_module("redrive.cli.frame").run(arguments))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "redrive":
            raise
        return _failed(name, _missing_extra(name, error))
    except RedriveError as error:
        return _failed(name, error)
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def signals_as_exits() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program by SystemExit, so that a command cleans up.

    It leaves no part of a file, and deletes a plan or an Inspection whose numbers it waits for.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others may handle none
    handled = [s for s in _ENDING_SIGNALS if is_main and signal.getsignal(s) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _missing_extra(name: str, error: ModuleNotFoundError) -> RedriveError:
    """Return the error of a command that lacks a package of its extra."""
    extra = COMMANDS[name].extra if name in COMMANDS else "cli"
    return RedriveError(
        f"`redrive {name}` needs redrive[{extra}]: the module {error.name} is not installed",
        remedy=f"pip install 'redrive[{extra}]'",
        reason="MissingExtra",
    )


def _run_operator(arguments: Sequence[str]) -> int:
    options = import_module("redrive.cli.operator_arguments").parse(
        arguments, f"{program_name()} operator"
    )
    import_module("redrive.cli.operator").run(options)
    return 0


def _failed(name: str, error: RedriveError) -> int:
    """Print *error*, for the operator and for missing extras after its reason; return 1."""
    is_logged = name == "operator" or error.reason == "MissingExtra"
    prefix = f"redrive: {error.reason}" if is_logged else "error"
    notes = getattr(error, "__notes__", ())
    print(f"{prefix}: {error}", *notes, sep="\n", file=sys.stderr)  # noqa: T201  what a command answers
    return 1
