"""The command line: its parser and exit codes. `linearizer run MODEL --budget 256`

run_commands.py has the commands that make and judge a student, student_commands.py the commands that use one, and
runs.py the command `runs`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from linearizer import __version__
from linearizer.cli import run_commands, runs, student_commands
from linearizer.cli.options import OPERANDS
from linearizer.errors import FaultError, LinearizerError, RequestError, Stopped


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, so that `main` prints them like all others."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see `{self.prog} --help`")


def main(words: Sequence[str] | None = None) -> int:
    """Serve one command; return 0 for done, 1 for a fault, 2 for a refused request, 130 for stopped."""
    try:
        arguments = parser().parse_args(words)
        arguments.serve(arguments)
        print(end="", flush=True)  # noqa: T201
    except LinearizerError as error:
        print(f"linearizer: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("linearizer: stopped", file=sys.stderr)  # noqa: T201
        return Stopped.exit_code
    except BrokenPipeError:  # who read the output has gone, as in `linearizer runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes at its end
        return FaultError.exit_code
    return 0


def parser() -> Parser:
    root = Parser(prog="linearizer", description="Turn a causal language model into one with a state of fixed size.")
    root.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, serve: Callable[[argparse.Namespace], None], about: str, operand: str = "", description: str = ""
    ) -> Any:
        """Add a command, whose first operand may be a model or a run."""
        command = commands.add_parser(name, help=about, description=description or f"{about[0].upper()}{about[1:]}.")
        command.set_defaults(serve=serve)
        if operand:
            command.add_argument(operand, metavar=operand.upper(), help=OPERANDS[operand])
        return command

    run_commands.add_commands(add)
    runs.add_command(add)
    student_commands.add_commands(add)
    for name, command in commands.choices.items():
        if name != "app":  # its product is a page
            command.add_argument("--json", action="store_true", help="print the product as JSON, and nothing else")
    return root
