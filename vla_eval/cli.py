"""The command line: a command is a function, its docstring is its help, its Answer is what stdout gets.

To add one: write a function here, decorate it with `@app.command`, import what is heavy inside it, return an `Answer`. `--json`, errors,
stdout and exit codes are dealt with once, in `main`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import __version__, registry
from .types import Task, VlaEvalError

DONE, INCOMPLETE, REFUSED, INTERRUPTED = 0, 1, 2, 130
Flag = Annotated[bool, Parameter(show_default=False)]
Words = Annotated[tuple[str, ...], Parameter(show_default=False)]

_log = logging.getLogger(__name__)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say: `data` for --json, `shown` for a person. Both go to stdout, and nothing else does."""

    data: Mapping[str, Any]
    shown: RenderableType
    exit: int = DONE


app = App(
    name="vla-eval",
    help="Evaluate vision-language-action policies, and their TensorRT engines, in simulation.",
    help_epilogue="Every command takes --json: then stdout is exactly one JSON object, and everything else goes to stderr.",
    version=lambda: f"vla-eval-trt {__version__}",  # another distribution owns the same command name: say which one answers
    default_parameter=Parameter(negative=()),
)


@app.command(name="list")
def list_() -> Answer:
    """Show every suite with its protocols, every policy and every model that can be exported."""
    suites: dict[str, Any] = {}
    table = Table("suite@protocol", "tasks", "step limit", "initial states", title="suites (--task)", title_justify="left")
    for name in registry.names(registry.TASKS):
        try:
            protocols = {protocol: _about(registry.load_tasks(protocol)) for protocol in registry.protocols(name)}
        except VlaEvalError as error:  # one broken plug-in hides no other
            suites[name] = {"error": str(error)}
            table.add_row(name, "–", "–", "–")
            _log.warning("%s", error)
            continue
        suites[name] = protocols
        for protocol, about in protocols.items():
            default = " (default)" if protocol == next(iter(protocols)) and len(protocols) > 1 else ""
            table.add_row(protocol + default, str(about["tasks"]), str(about["max_steps"]), str(about["trials"] or "unlimited"))
    policies, models = registry.names(registry.POLICIES), registry.names(registry.RECIPES)
    lines = f"policies (--policy): {', '.join(policies)}\nmodels (export --model): {', '.join(models) or 'none'}"
    return Answer({"suites": suites, "policies": policies, "models": models}, Group(table, Text(lines)))


def _about(tasks: Sequence[Task]) -> dict[str, Any]:
    trials = [task.trials for task in tasks if task.trials is not None]
    return {"tasks": len(tasks), "max_steps": max(task.max_steps for task in tasks), "trials": min(trials) if trials else None}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 incomplete or failed, 2 a request that cannot be met, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    logging.basicConfig(level=logging.WARNING, handlers=[_Lines()])
    with _stdout_for_results(as_json) as out:
        try:
            answer = app(
                words, console=Console(file=out), exit_on_error=False, print_error=False, result_action="return_value", help_on_error=False
            )
        except (VlaEvalError, CycloptsError) as error:
            answer = _refusal(error)
        except KeyboardInterrupt as stop:
            answer = Answer({"error": str(stop) or "interrupted"}, "", INTERRUPTED)
        if answer is None:  # --help and --version have spoken
            return DONE
        if message := answer.data.get("error") if answer.exit in (REFUSED, INTERRUPTED) else None:
            stderr.print(Text(f"vla-eval: {message}"))
        try:
            _tell(answer, out, as_json)
        except BrokenPipeError:  # `vla-eval list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        return int(answer.exit)


def _refusal(error: Exception) -> Answer:
    return Answer({"error": " ".join(str(error).split())}, "", REFUSED)


def _tell(answer: Answer, out: TextIOWrapper, as_json: bool) -> None:
    if as_json:
        out.write(json.dumps({**answer.data, "exit": answer.exit}, ensure_ascii=False, allow_nan=False) + "\n")
    elif answer.shown != "":
        Console(file=out, highlight=False).print(answer.shown)
    out.flush()


@contextlib.contextmanager
def _stdout_for_results(as_json: bool) -> Iterator[TextIOWrapper]:
    """The real stdout; until the end everybody else's prints, our own children's and C libraries' included, go to stderr.

    With `as_json` a crash leaves a JSON object too, beside its traceback on stderr.
    """
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr), os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        answered = False
        try:
            yield out
            answered = True
        finally:
            if as_json and not answered:
                out.write('{"error": "vla-eval failed; the traceback is on stderr", "exit": 1}\n')
                out.flush()
            os.dup2(out.fileno(), 1)


class _Lines(logging.Handler):
    """Log records as one line each on stderr, above a progress bar that may be there."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr.print(Text(f"vla-eval: {record.getMessage()}"))
