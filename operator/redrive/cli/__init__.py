"""The command `redrive`. Reading order: `main`, `arguments`, one module for each subcommand."""

from redrive.cli.main import main

__all__ = ["main"]
