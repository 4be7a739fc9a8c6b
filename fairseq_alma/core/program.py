"""What the command-line programs have in common: how they read their arguments, and how they end."""

import argparse
import re
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from fairseq_alma.core.errors import AlmaError, message_of
from fairseq_alma.core.printing import say
from fairseq_alma.core.provenance import version_of
from fairseq_alma.core.settings import nearest_key

P = ParamSpec("P")


class Parser(argparse.ArgumentParser):
    """Reads the arguments of a program. For an error, it prints one line with the nearest choice, and no usage."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **options)
        if " " not in self.prog:  # not that of a subcommand
            self.add_argument("--version", action="version", version=f"%(prog)s {version_of('fairseq-alma')}")

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {self.with_nearest(message)} (`{self.prog} --help` lists all options)", sys.stderr)
        sys.exit(2)

    def with_nearest(self, message: str) -> str:
        """Return an error message of argparse, with the choice or option that is most similar to the given one."""
        if found := re.match(r"unrecognized arguments: (--[^ =]+)", message):
            near = nearest_key(found[1], list(self._option_string_actions))
        elif "invalid choice: " in message:
            given, *choices = re.findall(r"'([^']*)'", message)
            near = nearest_key(given, choices)
        else:
            near = None
        return f"{message}: did you mean {near}?" if near else message


def add_models(parser: Parser, verb: str, stream: str = "the stream folder (default: the stream of the run)") -> None:
    """Add the arguments of a program that name models: a run and one of its stages, or checkpoints and their stream."""
    parser.add_argument(
        "path", nargs="+", type=Path, metavar="RUN|CHECKPOINT", help="a run folder, or the checkpoints of an ensemble"
    )
    parser.add_argument("--stage", type=int, metavar="K", help=f"{verb} RUN after stage K (default: the current one)")
    parser.add_argument("--stream", type=Path, help=stream)


def command(name: str, advice: str = "run the same command again") -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate the main function of a program, which returns an exit status. An error that the user can fix is printed.

    The exit status is 2 after such an error, 130 after Ctrl-C, which prints `advice`, and 1 if nobody reads the output.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @wraps(main)
        def run(*arguments: P.args, **options: P.kwargs) -> int:
            try:
                return main(*arguments, **options)
            except BrokenPipeError:
                # The program that reads the output, for example `head`, has ended. Without this line, Python would
                # write to the closed pipe when it exits, and would print an error.
                sys.stdout = None  # type: ignore[assignment]
                return 1
            except (AlmaError, OSError) as error:
                say(f"{name}: {message_of(error)}", sys.stderr)
                return 2
            except KeyboardInterrupt:
                return stopped(name, advice)

        return run

    return decorate


def stopped(name: str, advice: str = "run the same command again to continue", number: int = signal.SIGINT) -> int:
    """Print that a program was stopped by a signal, by default Ctrl-C, and return the exit status of shells for it."""
    say(f"{name}: stopped; {advice}", sys.stderr)
    return 128 + number
