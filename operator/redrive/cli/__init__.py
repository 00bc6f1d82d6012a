"""The command `redrive`. Reading order: `main`, then one module for each subcommand."""

from __future__ import annotations

from redrive.cli.main import main

__all__ = ["main"]
