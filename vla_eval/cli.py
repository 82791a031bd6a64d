"""The command line: a command is a function, its docstring is its help, its Answer is what stdout gets.

To add one: write a function here, decorate it with `@app.command`, import what is heavy inside it, return an `Answer`. `--json`, errors,
stdout and exit codes are dealt with once, in `main`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Sequence as AbcSequence
from dataclasses import asdict, dataclass
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Parameter, Token, convert
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from . import __version__, registry
from .types import BadRequest, EpisodeRecord, Policy, Task, VlaEvalError, silent
from .types import Progress as Told

if TYPE_CHECKING:
    from .engines.bundle import Bundle
    from .engines.trt_build import Built
    from .results.folder import RunFolder
    from .results.report import Report
    from .run.loop import Run

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


@dataclass(frozen=True, slots=True)
class Page:
    """Markdown: laid out on a terminal, as it is in a file or a pipe."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Markdown(self.text) if console.is_terminal else Text(self.text.rstrip())


def _strict(kind: Any, tokens: Sequence[Token]) -> Any:
    """As the library converts, but 1.5 is no whole number: it would be rounded in silence."""
    kinds = (kind, *get_args(kind))
    if int in kinds and (broken := [token.value for token in tokens if "." in token.value]):
        if str in kinds:
            return broken[0]
        raise ValueError(f"{broken[0]!r} is no whole number")
    return convert(kind, tokens)


app = App(
    name="vla-eval",
    help="Evaluate vision-language-action policies, and their TensorRT engines, in simulation.",
    help_epilogue="Every command takes --json: then stdout is exactly one JSON object, and everything else goes to stderr.",
    version=lambda: f"vla-eval-trt {__version__}",  # another distribution owns the same command name: say which one answers
    default_parameter=Parameter(negative=(), converter=_strict),
    suppress_keyboard_interrupt=False,  # it would leave without a word
)


@app.command
def run(
    *,
    task: Words = (),
    policy: str | None = None,
    bundle: Path | None = None,
    checkpoint: str | None = None,
    bundles: Path | None = None,
    yes: Flag = False,
    trials: int | None = None,
    seed: int | None = None,
    workers: int = 1,
    replan: int | None = None,
    batch: int | None = None,
    protocol: str | None = None,
    out: Path | None = None,
    option: Words = (),
    video: Flag = False,
    resume: Path | None = None,
    accept_revision: Flag = False,
    stop_when: str | None = None,
    wandb: Literal["off", "offline", "online"] = "off",
) -> Answer:
    """Play a policy on tasks and write down what happened: one run folder for each --task.

    Exit code 0: complete. 1: an episode is missing or ended in an error; --resume plays those. 2: asked for what cannot be done.

    Args:
        task: A suite or some of its tasks: libero_10, libero_10/3, libero_10@gr00t/0-4,7. Several --task make one run each.
        policy: A name that `vla-eval list` shows.
        bundle: The folder with the policy's engines, if it has any. [default: found in --bundles, else made of a checkpoint]
        checkpoint: A folder or REPO[/FOLDER] to make the bundle from. [default: what the policy's owner publishes for the suite]
        bundles: The folder that holds bundles. [default: $VLA_EVAL_BUNDLES, else one in the user's data folder]
        yes: Download what is missing without asking.
        trials: Episodes of each task, trials 0 to N-1. [default: 10]
        seed: Of the run; every episode and every chunk has one made from it. [default: 0]
        workers: Simulator processes; 0 plays in this one, for a debugger.
        replan: Actions of a chunk to execute before asking again. [default: the protocol's, else the whole chunk]
        batch: Requests that the policy answers together, fixed for a run. [default: 1]
        protocol: Short for the suffix of --task: gr00t means libero_10@gr00t.
        out: The folder that holds runs. [default: videos]
        option: NAME=VALUE for the policy; a number, true, false or null is one, anything else is text.
        video: Draw every episode once the run has been played.
        resume: A run folder: play what is missing there or ended in an error. The rest of the command may be left out.
        accept_revision: Resume although vla-eval has changed since; the manifest says so.
        stop_when: Stop early, with an error rate that holds however often one looks: "lower>0.9", "upper<0.5" or "versus RUN".
        wandb: Follow the run with Weights & Biases; offline writes it into the run folder and sends nothing.
    """
    from .run import loop

    if wandb != "off":
        from .results.wandb import check_installed

        check_installed()
    options = _options(option)
    asked: dict[str, Any] = {"trials": trials, "seed": seed, "replan": replan, "batch": batch, "options": options or None}
    given = {name: value for name, value in asked.items() if value is not None}
    if resume is not None:
        from .results.folder import open_run

        folder = open_run(resume)
        if stop_when is not None:
            raise BadRequest("--stop-when is fixed when a run begins; a resumed run keeps the rule that it has")
        if out is not None:
            raise BadRequest("--out is where a new run goes; a resumed run stays in its folder")
        if len(task) > 1:
            raise BadRequest("--resume goes on with one run, which is one suite; give one --task or none")
        tasks = _tasks_of(folder)
        if protocol is not None and protocol != folder.manifest.suite.partition("@")[2]:
            raise BadRequest(f"{resume} is a run of {folder.manifest.suite}, not of --protocol {protocol}; leave --protocol out")
        if task and {t.id for t in registry.select_tasks(task[0], protocol)} != {t.id for t in tasks}:
            raise BadRequest(f"{resume} is a run of {', '.join(t.id for t in tasks)}, not of --task {task[0]}; leave --task out")
        name = policy or folder.manifest.policy
        bundle = bundle or _found(name, folder.manifest.suite, bundles, checkpoint, yes, folder.manifest.bundle)
        player, facts = _loaded(name, bundle, folder.manifest.suite, options or folder.manifest.options)
        again = loop.resume(resume, player, tasks, workers=workers, video=video, accept_revision=accept_revision, **given, **facts)
        return _ended([_play(again, video, wandb)])
    if not task or policy is None:
        raise BadRequest(f"{'--policy' if task else '--task'} is missing; vla-eval list shows what there is")
    if accept_revision:
        raise BadRequest("--accept-revision goes with --resume; a new run has the present revision")
    suites = [registry.select_tasks(spec, protocol) for spec in task]  # all of them are known before the first is played
    places = [bundle or _found(policy, tasks[0].suite, bundles, checkpoint, yes) for tasks in suites]
    given |= {"out": out or Path("videos"), "video": video, "workers": workers, "command": ["vla-eval", *sys.argv[1:]]}
    if stop_when is not None:
        from .results.sequential import parse_rule

        given["stop"] = parse_rule(stop_when)
    ended = []
    for tasks, place in zip(suites, places, strict=True):
        player, facts = _loaded(policy, place, tasks[0].suite, options)
        ended.append(_play(loop.start(player, tasks, **given, **facts), video, wandb))
    return _ended(ended)


def _options(words: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        if not equals or not name.isidentifier():
            raise BadRequest(f"--option {word}: write NAME=VALUE")
        if name in options:
            raise BadRequest(f"--option {name} is given twice; say it once")
        try:
            value = json.loads(text, parse_constant=str)  # no manifest could hold a NaN
        except ValueError:
            value = text
        options[name] = text if isinstance(value, (dict, list)) else value
    return options


def _found(policy: str, suite: str, folder: Path | None, checkpoint: str | None, yes: bool, digest: str | None = None) -> Path | None:
    """The bundle for a policy that has engines, when none was named, by preference the one of `digest`; None for a policy without."""
    if policy not in registry.names(registry.RECIPES):
        if checkpoint is not None:
            raise BadRequest(f"--checkpoint: policy {policy!r} has no engines to make")
        return None
    from .bundles import obtain, shelf

    agree = (lambda _: True) if yes else _agreed
    return obtain(policy, suite, folder=shelf(folder), checkpoint=checkpoint, digest=digest, agree=agree, say=_say, busy=_busy)


def _agreed(offer: Callable[[], str]) -> bool:
    """A yes on a terminal; nobody is asked in CI, in a pipe or behind --json."""
    if os.environ.get("CI") or not (sys.stdin and sys.stdin.isatty() and stderr.is_terminal):
        return False
    stderr.print(Text(f"{offer()} [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextlib.contextmanager
def _busy(line: str) -> Iterator[Told]:
    """Something that takes a while: its line, and on a terminal a bar that moves, or fills once it is told how much is done."""
    _say(line)
    with _meter() as progress:
        yield progress


def _say(line: str) -> None:
    stderr.print(Text(f"vla-eval: {line}"))


def _loaded(name: str, bundle: Path | None, suite: str, options: Mapping[str, Any]) -> tuple[Policy, dict[str, Any]]:
    """The policy, and what the manifest has to say about its engines."""
    if bundle is None:
        return registry.load_policy(name, **options), {}
    from .bundles import check_fits
    from .engines.bundle import open_bundle

    opened = open_bundle(bundle)
    check_fits(opened, name, suite)
    policy = registry.load_policy(name, bundle=bundle, **options)
    said: Mapping[str, Mapping[str, str]] = getattr(policy, "engines", {})  # component -> what runs it
    engines = {name: {"dtype": component.dtype, **said.get(name, {})} for name, component in opened.components.items()}
    backend = ", ".join(sorted({f"{about['backend']} {about['version']} on {about['device']}" for about in said.values()})) or "unknown"
    _say(f"{name} runs on {backend}")
    return policy, {"bundle": opened.digest, "backend": backend, "engines": engines}


def _tasks_of(folder: RunFolder) -> list[Task]:
    wanted = {task for task, _ in folder.manifest.ledger}
    return [task for task in registry.load_tasks(folder.manifest.suite) if task.id in wanted]


def _play(run: Run, video: bool, wandb: Literal["off", "offline", "online"] = "off") -> tuple[Path, Report]:
    """Play a run to its end under a progress bar, then draw it. Ctrl-C leaves with the command that goes on."""
    from .results.folder import open_run
    from .results.report import report as read

    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as afterwards:
        with run:
            assert run.folder is not None  # started with `out`
            path = run.folder.path
            if wandb != "off":
                from .results.wandb import following

                afterwards.enter_context(following(path, wandb))
            try:
                with _progress(f"{run.manifest.suite} {run.manifest.policy}", len(run.todo)) as advance:
                    for record in run:
                        counts[record.outcome] += 1
                        line = f"{record.task} trial {record.trial}: {record.outcome}, {record.steps} steps, {record.seconds:.1f} s"
                        advance(line + (f", {record.error}" if record.error else ""), _outcomes(counts))
            except KeyboardInterrupt as stop:
                done = f"{_how(stop)} after {counts.total()} of {len(run.todo)} episodes"
                raise type(stop)(f"{done}; go on with: vla-eval run --resume {path}") from None
        if run.stopped:
            _say(f"stopped, {run.stopped}")
        if video:
            _draw(path, [r for r in open_run(path).records() if r.video is None and r.steps])
    return path, read(open_run(path))


def _draw(path: Path, undrawn: Sequence[EpisodeRecord]) -> None:
    """Draw episodes in a process of its own: the policy may hold the GPU of this one."""
    if not undrawn:
        return
    words = [word for r in undrawn for word in ("--episode", f"{r.task.rpartition('/')[2]}/{r.trial}")]
    if subprocess.run([sys.executable, "-m", "vla_eval", "render", str(path), *words], check=False).returncode:
        _log.warning("not every film could be drawn; vla-eval render %s tries again", path)


def _outcomes(counts: Counter[Any]) -> str:
    return " · ".join(f"{counts[outcome]} {outcome}" for outcome in ("success", "failure", "error"))


def _ended(reports: Sequence[tuple[Path, Report]]) -> Answer:
    """What `run` says at its end: rates, the folder, and what to type next."""
    shown: list[RenderableType] = []
    for path, found in reports:
        only = "failures" if found.failure else "successes"
        commands = [f"report {path}", f"render {path} --only {only}", f"check {path}"]
        if not found.complete:
            commands = [f"run --resume {path}", *commands[:2]]
        shown += [_rates(found), Text(f"\n{path}\n\nnext:\n" + "\n".join(f"  vla-eval {command}" for command in commands))]
    told = [_told(path, found) for path, found in reports]
    worst = DONE if all(found.complete for _, found in reports) else INCOMPLETE
    return Answer(told[0] if len(told) == 1 else {"runs": told}, Group(*shown), worst)


def _told(path: Path, found: Report) -> dict[str, Any]:
    from .results.failures import bins, failures_json
    from .results.folder import open_run

    return {**found.to_json(), "folder": str(path), "failures": failures_json(bins(open_run(path)))}


def _rates(found: Report) -> Table:
    from .results.report import between, percent

    state = "" if found.complete else ", INCOMPLETE"
    title = f"{found.suite}, {found.policy}, replan {found.replan}, seed {found.seed}{state}"
    table = Table("task", "success", "rate", "95 % interval", "errors", title=title, title_justify="left", show_footer=len(found.tasks) > 1)
    for line in found.tasks:
        table.add_row(line.task, f"{line.rate.k}/{line.rate.n}", percent(line.rate.value), between(line.rate.wilson), str(line.error))
    rate = found.rate
    footer = ("all", f"{rate.k}/{rate.n}", percent(rate.value), between(found.anytime or rate.wilson), str(found.error))
    for column, text in zip(table.columns, footer, strict=True):
        column.footer = text
    return table


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[str, str], None]]:
    """A bar on a terminal, with rate and time left; elsewhere one line for each thing done. Both on stderr."""
    if not stderr.is_terminal:
        yield lambda line, state: stderr.print(Text(f"{title}: {line}"))
        return
    whole = Column(no_wrap=True)  # where it gets narrow the bar gives way, and no number
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(table_column=whole.copy()),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(table_column=whole.copy()),
        TextColumn("left"),
        TimeRemainingColumn(table_column=whole.copy()),
        TextColumn("{task.fields[state]}"),
    )
    stderr.print(Text(title))  # beside the bar it would take a third of 80 columns
    with Progress(*columns, console=stderr) as progress:
        bar = progress.add_task(title, total=total, state="", rate="")

        def advance(line: str, state: str) -> None:
            speed = progress.tasks[0].speed
            progress.update(bar, advance=1, state=state, rate=f"{60 * speed:.1f}/min" if speed else "")

        yield advance


@app.command
def render(
    run: Path,
    /,
    *,
    only: Literal["failures", "successes", "all"] = "all",
    episode: Words = (),
    camera: Words = (),
    size: int | None = None,
    fps: float | None = None,
) -> Answer:
    """Draw films of a run's episodes from their recorded states: every camera side by side, captioned with step, chunk and goal.

    Args:
        run: A run folder.
        only: Which episodes.
        episode: TASK/TRIAL, such as 3/0; may be given several times, and then --only does not count.
        camera: A camera's name; may be given several times. [default: every camera of the environment]
        size: Height and width of a picture in pixels. [default: the run's]
        fps: Frames a second. [default: real time]
    """
    from .results.folder import open_run
    from .run import render as rendering

    chosen = []
    for word in episode:
        found = re.fullmatch(r"(\d+)/(\d+)", word, re.ASCII)
        if not found:
            raise BadRequest(f"--episode {word}: write TASK/TRIAL, such as 3/0")
        chosen.append((int(found[1]), int(found[2])))
    if size is not None and not 8 <= size <= 4096:
        raise BadRequest(f"--size {size}: a picture has between 8 and 4096 pixels a side")
    folder = open_run(run)
    todo = rendering.chosen(folder, only, chosen)
    films = []
    with _progress(f"drawing {run.name}", len(todo)) as advance:
        for record in rendering.render(folder, todo, cameras=camera, size=size, fps=fps):
            films.append(str(folder.path / str(record.video)))
            advance(films[-1], "")
    return Answer({"videos": films}, Text("\n".join(films) or f"{run}: no episode to draw"))


@app.command
def infer(
    bundle: Path,
    /,
    *,
    observation: Path | None = None,
    canonical: Path | None = None,
    noise: Path | None = None,
    seed: int | None = None,
    steps: int | None = None,
    option: Words = (),
) -> Answer:
    """Ask a bundle once: an observation in, the chunk of actions out, normalised and in robot units. Give one of the first two options.

    Args:
        bundle: A bundle.
        observation: A .npz whose arrays have the keys, dtypes and shapes of the bundle's robot, instruction included.
        canonical: A folder with what the network itself takes: pixel_values.bin, token_ids.csv, x0.bin. The chunk stays normalised.
        noise: A .npy with the start of the flow, one row for each observation. [default: drawn from the seed]
        seed: Of the noise, if none is given. [default: 0]
        steps: Denoise steps; short for --option steps=N.
        option: NAME=VALUE for the policy, as in `run`.
    """
    from .arrays import read_npy, read_npz
    from .engines.bundle import open_bundle

    opened = open_bundle(bundle)
    options = _options(option)
    if steps is not None and options.setdefault("steps", steps) != steps:
        raise BadRequest(f"--steps {steps} and --option steps={options['steps']} disagree; say it once")
    if canonical is not None:
        if observation is not None or noise is not None or seed is not None:
            raise BadRequest("--canonical brings its own pictures, prompt and noise: leave --observation, --noise and --seed out")
        arrays = _asked(registry.load_policy(opened.model, bundle=bundle, **options), opened.model, "infer_canonical")(canonical)
    elif observation is not None:
        given = read_npz(observation).items()
        seen = {key: value.item() if value.dtype.kind in "US" and value.ndim == 0 else value for key, value in given}
        start = None if noise is None else read_npy(noise)
        ask = _asked(registry.load_policy(opened.model, bundle=bundle, **options), opened.model, "infer")
        arrays = ask(seen, noise=start, seed=seed or 0)
    else:
        raise BadRequest("give --observation FILE or --canonical DIR")
    table = Table("array", "shape", "least", "most", "first row", title=f"{bundle}, {opened.model}", title_justify="left")
    for key, array in arrays.items():
        first = " ".join(f"{number:.4g}" for number in array.reshape(-1, array.shape[-1])[0][:8]) + (" …" if array.shape[-1] > 8 else "")
        table.add_row(key, str(list(array.shape)), f"{array.min():.4g}", f"{array.max():.4g}", first)
    return Answer({"bundle": opened.digest, "arrays": {key: array.tolist() for key, array in arrays.items()}}, table)


def _asked(policy: Policy, name: str, how: str) -> Callable[..., Any]:
    """What a policy may offer besides acting in episodes."""
    if not hasattr(policy, how):
        raise BadRequest(f"policy {name!r} cannot be asked that way outside an episode; it has no `{how}`")
    method: Callable[..., Any] = getattr(policy, how)
    return method


Passed = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


@app.command(help_flags=[])
def export(*words: Passed, model: str | None = None) -> Answer:
    """Turn a checkpoint into a bundle: graphs, tables and the policy's contract. `--help --model NAME` shows the model's own options.

    Args:
        words: The model's own options, such as --checkpoint DIR --out DIR.
        model: What the checkpoint is of; `vla-eval list` shows the models.
    """
    if model is None:
        return _no_model("export", words, registry.RECIPES)
    return _export(words, model, "export")


def _export(words: Sequence[str], model: str, command: str, components: Sequence[str] = ()) -> Answer:
    with _meter() as progress:
        made = _call_with(registry.load_recipe(model), f"vla-eval {command} --model {model}", words, progress)
    if isinstance(made, str):
        return Answer({"help": made}, Text(made))
    data = {"bundle": str(made.path), "export_id": made.export_id, "digest": made.digest, "components": sorted(made.components)}
    if made.frontend == "direct":
        from .engines.trt_build import standing

        built = [standing(component, new=True) for name, component in made.components.items() if name in (components or made.components)]
        table, told = _plans(str(made.path), built)
        return Answer({**data, "plans": told}, table)
    return Answer(data, Text(f"{made.path}: {', '.join(sorted(made.components))}, export {made.export_id}"))


@app.command(help_flags=[])
def build(*words: Passed, components: str | None = None, force: bool = False, direct: bool = False, model: str | None = None) -> Answer:
    """Build a bundle's TensorRT plans for this machine's GPU: `vla-eval build BUNDLE`. Types and lengths are the bundle's.

    With --direct a checkpoint becomes plans with no ONNX in between; `build --direct --help --model NAME` shows the model's own options.

    Args:
        words: The bundle; with --direct the model's own options, such as --checkpoint DIR --out DIR.
        components: Only some of them, such as visual,action. [default: all]
        force: Build also where an up-to-date plan is there.
        direct: Draw the networks straight from a checkpoint.
        model: With --direct: what the checkpoint is of.
    """
    if direct:
        if model is None:
            return _no_model("build --direct", words, registry.RECIPES)
        if force:
            raise BadRequest("--force: a direct build always builds; leave it out")
        chosen = ["--components", components] if components else []
        return _export([*words, "--direct", *chosen], model, "build --direct", components.split(",") if components else ())
    if {"--help", "-h"} & set(words):
        console = Console(record=True, file=StringIO(), width=120)
        app.help_print(["build"], console=console)
        text = console.export_text()
        return Answer({"help": text}, Text(text))
    if model is not None:
        raise BadRequest("--model goes with --direct; without it the bundle says what it is of")
    if len(words) != 1 or words[0].startswith("-"):
        raise BadRequest("build wants one bundle, as in `vla-eval build BUNDLE`, or --direct --model NAME with the model's own options")
    from .engines import trt_build
    from .engines.bundle import open_bundle

    built = trt_build.build(open_bundle(words[0]), components.split(",") if components else (), force=force)
    table, told = _plans(words[0], built)
    return Answer({"bundle": words[0], "plans": told}, table)


def _plans(bundle: str, built: Sequence[Built]) -> tuple[Table, list[dict[str, Any]]]:
    """What was built, for a person and as JSON: a row a component."""
    table = Table("component", "plan", "size", "seconds", "weights", "peak memory", title=bundle, title_justify="left")
    for one in built:
        size, weights, peak = (f"{count / 1e6:.1f} MB" for count in (one.bytes, one.weights, one.peak))
        table.add_row(one.component, one.plan.name, size, f"{one.seconds:.1f}" if one.new else "was there", weights, peak)
    return table, [{**asdict(one), "plan": str(one.plan)} for one in built]


@app.command(help_flags=[])
def synth(*words: Passed, model: str | None = None) -> Answer:
    """Write a checkpoint of random numbers in a model's real layout. `--help --model NAME` shows the model's own options.

    Args:
        words: The model's own options, such as --out DIR.
        model: Whose layout; `vla-eval list` shows the models.
    """
    if model is None:
        return _no_model("synth", words, registry.SYNTHS)
    made = _call_with(registry.load_synth(model), f"vla-eval synth --model {model}", words)
    if isinstance(made, str):
        return Answer({"help": made}, Text(made))
    told, geometry = f"{made}: a checkpoint of random numbers; what it makes a robot do means nothing", Path(made) / "geometry.json"
    if geometry.is_file():
        told += f". Its sizes are its own: export it with --geometry {geometry}"
    return Answer({"checkpoint": str(made)}, told)


def _no_model(command: str, words: Sequence[str], group: str) -> Answer:
    models = ", ".join(registry.names(group))
    if not {"--help", "-h"} & set(words):
        raise BadRequest(f"--model is missing; there are: {models}")
    text = f"Usage: vla-eval {command} --model NAME [OPTIONS]\n\nModels: {models}. Add --help after --model NAME for its options."
    return Answer({"help": text}, Text(text))


def _call_with(function: Callable[..., Any], name: str, words: Sequence[str], progress: Told = silent) -> Any:
    """Call a plug-in's function with a command line that its signature describes; with --help among the words, its help as text.

    A parameter called `progress` is no option: it is given what is to be told.
    """
    function = registry.with_progress(function, progress)
    parameter = Parameter(negative=(), show_default=_default, converter=_strict)
    inner = App(name=name, default_parameter=parameter, version_flags=[], suppress_keyboard_interrupt=False)
    inner.default(function)
    if {"--help", "-h"} & set(words):
        console = Console(record=True, file=StringIO(), width=120)
        inner.help_print(console=console)
        return console.export_text()
    kinds = get_type_hints(function).items()
    many = {f"--{name.replace('_', '-')}" for name, kind in kinds if get_origin(kind) in (AbcSequence, tuple, list)}
    return inner(list(_split_lists(words, many)), exit_on_error=False, print_error=False, result_action="return_value", help_on_error=False)


def _default(value: Any) -> str | None:
    """A default as one would type it; what says nothing is left out."""
    if value is None or value is False or value == ():
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _split_lists(words: Sequence[str], many: Collection[str]) -> Iterator[str]:
    """`--steps 4,8` is `--steps 4 --steps 8`."""
    rest = iter(word for given in words for word in (given.split("=", 1) if given.partition("=")[0] in many else [given]))
    for word in rest:
        if word in many and (value := next(rest, None)) is not None:
            for part in value.split(","):
                yield from (word, part)
        else:
            yield word


@app.command
def verify(
    bundle: Path,
    /,
    *,
    reference: Path | None = None,
    against: Path | None = None,
    dump: Path | None = None,
    tensors: tuple[Path, Path, Path, Path] | None = None,
    steps: int | None = None,
    backend: str = "auto",
) -> Answer:
    """Hold a bundle's components against other numbers on the same inputs, call by call; exit code 1 if a gate is missed.

    Give one of the first four options. A reference should come from another program or an earlier run: a bundle always agrees with itself.

    Args:
        bundle: A bundle.
        reference: A .npz with the inputs and outputs of components, keys like action/2/out/velocity.
        against: Another bundle, run on the inputs that this one carries.
        dump: Write what this bundle computes from those inputs, as a later --reference.
        tensors: pixel_values.bin token_ids.csv x0.bin actions.npy of another program: the final chunk alone, which hides errors of a step.
        steps: Denoise steps that --tensors was made with. [default: the policy's]
        backend: What runs the components.
    """
    from .arrays import read_npz, write_npz
    from .engines import verify as verifying
    from .engines.bundle import open_bundle

    if sum(given is not None for given in (reference, against, dump, tensors)) != 1:
        raise BadRequest("give one of --reference, --against, --dump and --tensors")
    if steps is not None and tensors is None:
        raise BadRequest("--steps belongs to --tensors: the other references hold one call for each step")
    if dump is not None and (dump.is_dir() or not dump.parent.is_dir()):
        raise BadRequest(f"--dump {dump}: {'that is a folder' if dump.is_dir() else 'there is no such folder'}; name a file to write")
    opened = open_bundle(bundle)
    if tensors is not None:
        options = {"backend": backend} if steps is None else {"backend": backend, "steps": steps}
        row = verifying.score(*_asked(registry.load_policy(opened.model, bundle=bundle, **options), opened.model, "reproduce")(*tensors))
        told = f"{'passed' if row.passed else 'FAILED'}: cosine {row.cosine:.9f}, at least {verifying.CHUNK_COSINE}; largest difference "
        told += f"{row.max_abs:.3g} in action {row.worst[0]}, number {row.worst[1]}, at most {verifying.CHUNK_MAX_ABS}"
        scored = {
            "bundle": opened.digest, "passed": row.passed, "cosine": row.cosine, "max_abs": row.max_abs, "worst": list(row.worst),
            "gate": {"cosine": verifying.CHUNK_COSINE, "max_abs": verifying.CHUNK_MAX_ABS},
        }  # fmt: skip
        return Answer(scored, Text(told), DONE if row.passed else INCOMPLETE)
    if reference is not None:
        verdict = verifying.compare(opened, read_npz(reference), backend=backend)
    else:
        other = open_bundle(against) if against is not None else opened
        inputs = read_npz(opened.path / verifying.SELFTEST)
        shared = {key: array for key, array in inputs.items() if key.partition("/")[0] in {*opened.components} & {*other.components}}
        found = verifying.trace(other, shared, backend=backend)
        if dump is not None:
            write_npz(dump, found)
            return Answer({"dump": str(dump), "arrays": len(found), "bundle": opened.digest}, Text(f"{dump}: {len(found)} arrays"))
        verdict = verifying.compare(opened, found, precision=str(other.options["dtype"]), backend=backend)
    table = Table("component", "call", "output", "cosine", "max abs", "relative", "scale", "worst at", "")
    for row in verdict.rows:
        sign = "pass" if row.passed else "FAIL (stale)" if row.stale else "FAIL"
        numbers = (f"{row.cosine:.9f}", f"{row.max_abs:.3g}", f"{row.relative:.3g}", f"{row.scale:.6f}")
        table.add_row(row.component, str(row.call), row.output, *numbers, ", ".join(map(str, row.worst)), sign)
    gate = verdict.gate
    lines = f"{'passed' if verdict.passed else 'FAILED'}: cosine at least {gate.cosine}, largest difference at most {gate.relative} of the "
    lines += f"reference's largest number, scale within {gate.scale} of 1"
    if verdict.not_compared:
        lines += f"; not compared: {', '.join(verdict.not_compared)}"
    data = {"bundle": opened.digest, "reference": str(reference or against), **verdict.data()}
    return Answer(data, Group(table, Text(lines)), DONE if verdict.passed else INCOMPLETE)


@app.command
def bench(
    bundle: Path,
    /,
    *,
    against: Literal["torch"] | None = None,
    requests: int | None = None,
    warm_up: int | None = None,
    instruction: str | None = None,
    backend: str = "auto",
    option: Words = (),
) -> Answer:
    """Measure how long a bundle takes to answer, stage by stage, on random pictures of its robot under a real instruction.

    Args:
        bundle: A bundle.
        against: torch: the same network in PyTorch as one CUDA graph, in the same run; from a checkout, with PyTorch and a GPU.
        requests: How many are measured, one after another. [default: 500 on a GPU, 20 on a CPU]
        warm_up: How many are answered before and not counted. [default: 20 on a GPU, 2 on a CPU]
        instruction: What the robot is told. [default: of the tasks of the bundle's suites, the one of middle length]
        backend: What runs the components.
        option: NAME=VALUE for the policy, as in `run`.
    """
    from .engines import bench as timing
    from .engines.bundle import open_bundle
    from .results.stats import percentiles

    opened, options = open_bundle(bundle), _options(option)
    if backend != "auto" and options.setdefault("backend", backend) != backend:
        raise BadRequest(f"--backend {backend} and --option backend={options['backend']} disagree; say it once")
    words = _usual_instruction(opened) if instruction is None else instruction
    began = time.perf_counter()
    policy = registry.load_policy(opened.model, bundle=bundle, **options)
    loaded = time.perf_counter() - began
    engines: Mapping[str, Mapping[str, str]] = getattr(policy, "engines", {})
    on_card = any(about["backend"] != "onnxruntime" for about in engines.values())
    if against is not None and not on_card:
        raise BadRequest(f"--against {against} needs {bundle} on a GPU: a CPU's time beside a GPU's says nothing; build its plans there")
    rehearsal = _asked(policy, opened.model, "rehearse")(words)
    other = None
    if against is not None:
        if rehearsal.rival is None:
            raise BadRequest(f"{bundle} has other sizes than the released model with two pictures, which is what the PyTorch baseline runs")
        other = timing.rival(opened.model, {"dtype": opened.options["dtype"], **rehearsal.rival})
    count, warm = (500, timing.WARM_UP) if on_card else (20, 2)
    count, warm = count if requests is None else requests, warm if warm_up is None else warm_up
    found = timing.measure(rehearsal.answer, requests=count, warm_up=warm, on_card=on_card)
    ms = {}
    for stage, values in found.seconds.items():
        quantiles = percentiles(values)
        assert quantiles is not None
        ms[stage] = {q: 1e3 * getattr(quantiles, q) for q in ("p50", "p90", "p99")} | {"max": 1e3 * max(values)}
    about = {**rehearsal.about, "instruction": words, "frontend": opened.frontend, "dtype": opened.options["dtype"]}
    data = {
        "bundle": opened.digest, "model": opened.model, **about, "engines": engines, "load_seconds": loaded, "requests": found.requests,
        "warm_up": found.warm_up, "warm_up_seconds": found.warm_up_s, "ms": ms,
        "requests_per_second": 1e3 * rehearsal.about["batch"] / ms["whole"]["p50"],
    }  # fmt: skip
    table = Table("stage", *(Column(q, justify="right") for q in ("p50", "p90", "p99", "max")), title=f"{bundle}, ms", title_justify="left")
    for stage, row in ms.items():
        table.add_row(stage, *(f"{value:.3f}" for value in row.values()))
    lines = [", ".join(f"{name} {value}" for name, value in about.items())]
    lines += [f"{name}: {', '.join(f'{key} {value}' for key, value in said.items())}" for name, said in engines.items()]
    lines.append(f"loaded in {loaded:.1f} s")
    lines.append(f"{found.requests} requests after {found.warm_up} that are not counted ({found.warm_up_s:.1f} s)")
    if other is not None:
        ratio = other["parts"]["e2e"]["p50"] / ms["gpu"]["p50"]
        data["against"] = {**other, "times_faster": ratio}
        parts = ", ".join(f"{part} {times['p50']:.3f}" for part, times in other["parts"].items())
        lines.append(f"torch {other['torch']} as one CUDA graph, GPU ms: {parts}; that is {ratio:.2f} times this bundle's")
    return Answer(data, Group(table, Text("\n".join(lines))))


def _usual_instruction(bundle: Bundle) -> str:
    """Of the tasks that the bundle was trained for, or else of all that are registered, the instruction of middle length."""
    known = registry.names(registry.TASKS)
    served = [suite for suite in bundle.policy.get("trained_for", []) if suite in known] or known
    told = {task.instruction for suite in served for task in registry.load_tasks(suite)}
    if not told:
        raise BadRequest("no suite is installed whose instructions could be used; give --instruction")
    return sorted(told, key=lambda text: (len(text), text))[len(told) // 2]


@app.command(name="bundles")
def bundles_(folder: Path | None = None, /) -> Answer:
    """Show the bundles that `run` can find, with the suites they serve, precision, route, digest and size.

    Args:
        folder: Where to look. [default: $VLA_EVAL_BUNDLES, else a folder in the user's data folder]
    """
    from . import bundles

    place = bundles.shelf(folder)
    found, broken = bundles.bundles(place)
    table = Table("bundle", "policy", "suites", "precision", "route", "digest", "size", title=str(place), title_justify="left")
    told = []
    for bundle in found:
        size, dtype = bundles.size(bundle), str(bundle.options.get("dtype", "?"))
        served = bundles.suites(bundle)
        names = ", ".join(served) or "not said"
        row = {"path": str(bundle.path), "policy": bundle.model, "suites": served, "dtype": dtype, "frontend": bundle.frontend}
        told.append({**row, "digest": bundle.digest, "export_id": bundle.export_id, "bytes": size})
        table.add_row(bundle.path.name, bundle.model, names, dtype, bundle.frontend, bundle.digest[:12], f"{size / 1e6:.1f} MB")
    for sentence in broken:
        _log.warning("%s", sentence)
    shown = table if found else Text(f"{place} holds no bundle; vla-eval export makes one")
    return Answer({"folder": str(place), "bundles": told, "broken": broken}, shown)


@app.command
def report(run: Path, /, *, html: Flag = False, draw: Literal["failures", "all", "none"] = "failures") -> Answer:
    """Show what a run folder says: rates with intervals by task, what is missing, latency. Into a file or pipe it is Markdown.

    Args:
        run: A run folder.
        html: Write RUN/review too, a folder of pages for a browser: every episode with film, contact sheet and what went wrong.
        draw: With --html: which films to draw first, where the run folder lacks them.
    """
    from .results.failures import bins, failures_markdown
    from .results.folder import open_result, open_run
    from .results.report import report as read

    folder = open_result(run)
    folder.played()
    found = read(folder)
    told, page = _told(folder.path, found), found.markdown()
    if sorted_ := failures_markdown(bins(folder)):
        page += f"\n{sorted_}"
    if html:
        from .results.pages import review

        wanted = {"failures": ("failure",), "all": ("success", "failure", "error"), "none": ()}[draw]
        _draw(run, _undrawn(folder, wanted))
        told["html"] = str(review(open_run(run), run / "review"))
        page += f"\nPages for a browser: {told['html']}\n"
    return Answer(told, Page(page))


def _undrawn(folder: RunFolder, outcomes: Sequence[str]) -> list[EpisodeRecord]:
    def lacks_film(record: EpisodeRecord) -> bool:
        place = folder.episode_path(record.task, record.trial)
        return place.exists() and not place.with_suffix(".mp4").exists()

    return [record for record in folder.records() if record.outcome in outcomes and lacks_film(record)]


@app.command
def compare(
    a: Path,
    b: Path,
    /,
    *,
    margin: float = 0.05,
    diff: Flag = False,
    html: Flag = False,
    draw: Literal["disagreements", "none"] = "disagreements",
) -> Answer:
    """Is B worse than A? Pairs two runs episode by episode: exact test, difference with interval, verdict, and who disagrees where.

    Args:
        a: The run to hold against: the reference.
        b: The run to judge.
        margin: How much worse still counts as not worse; 0.05 is five points.
        diff: Show every difference of the two manifests instead, also of runs that cannot be paired.
        html: Write B/versus-A too, a folder of pages with the episodes that disagree side by side.
        draw: With --html: draw the films that the run folders lack, or none.
    """
    from .results.compare import compare as pair
    from .results.compare import difference_markdown
    from .results.difference import differences
    from .results.folder import open_result, open_run

    one, other = open_result(a), open_result(b)
    if diff:
        found = differences(one.manifest, other.manifest)
        return Answer({"differences": [d._asdict() for d in found]}, Page(difference_markdown(one.manifest, other.manifest)))
    result = pair(one, other, margin)
    told, page = result.to_json(), result.markdown()
    if html:
        from .results.pages import review_pair

        apart = {(d.task, d.trial) for d in result.disagreements}
        for folder in (one, other) if draw == "disagreements" else ():
            undrawn = _undrawn(folder, ("success", "failure"))
            _draw(folder.path, [record for record in undrawn if (record.task, record.trial) in apart])
        told["html"] = str(review_pair(result, open_run(a), open_run(b), b / f"versus-{one.manifest.run_id}"))
        page += f"\nPages for a browser: {told['html']}\n"
    return Answer(told, Page(page))


@app.command
def leaderboard(*places: Path, sort: str | None = None, html: Path | None = None) -> Answer:
    """Show many runs as tables, one for each set of conditions, ranked where the rates can be told apart.

    Args:
        places: Run folders, folders that hold runs, and result files: published ones, lerobot's eval_info.json, other harnesses'.
        sort: A suite, policy, date or latency. [default: by rank]
        html: Write one page for a browser there too, sortable and without a network.
    """
    from .results.leaderboard import leaderboard as read
    from .results.leaderboard import markdown, to_json

    tables = read(places or (Path("videos"),), sort)
    told, page = to_json(tables), markdown(tables)
    if html is not None:
        from .results.pages import leaderboard_page

        told["html"] = str(leaderboard_page(tables, html))
        page += f"\nPage for a browser: {told['html']}\n"
    return Answer(told, Page(page))


@app.command
def power(*, p0: float, margin: float = 0.05, power: float = 0.8, p1: float | None = None, discordant: float | None = None) -> Answer:
    """Say how many paired episodes a comparison needs to find a policy not worse.

    Args:
        p0: The rate of the policy to hold against.
        margin: How much worse still counts as not worse; 0.05 is five points.
        power: How often the comparison shall succeed if the new policy's true rate is --p1.
        p1: The true rate of the new policy. [default: p0]
        discordant: The share of episodes on which the two disagree. [default: as if they succeeded independently, the worst usual case]
    """
    from .results.stats import independent_discordance, pairs_needed, verdict_power

    other = p0 if p1 is None else p1
    for name, value in (("p0", p0), ("p1", other)):
        if not 0 <= value <= 1:
            raise BadRequest(f"--{name} {value} is no rate; give one between 0 and 1")
    share = independent_discordance(p0, other) if discordant is None else discordant
    pairs = pairs_needed(margin, share, power, other - p0)
    exact = verdict_power(pairs, margin, share, other - p0)
    told = (
        f"{pairs} pairs of episodes: with rates {p0:g} and {other:g}, {100 * share:.1f} % of pairs disagreeing and a margin of "
        f"{100 * margin:g} points, {100 * exact:.1f} % of such comparisons end with the verdict 'not worse'."
    )
    return Answer({"pairs": pairs, "power": exact, "margin": margin, "p0": p0, "p1": other, "discordant": share}, Text(told))


@app.command(name="wandb")
def wandb_(run: Path, /, *, mode: Literal["online", "offline"] = "online") -> Answer:
    """Send a run folder to Weights & Biases: configuration, metrics, a table of episodes with their films, rollouts and report.

    Args:
        run: A run folder.
        mode: offline writes it into RUN/wandb and sends nothing.
    """
    from .results.folder import open_result
    from .results.wandb import check_installed, run_id, send

    check_installed()
    folder = open_result(run)
    folder.played()
    sent = send(folder.path, mode)
    told = {"run": folder.manifest.run_id, "wandb": run_id(folder.manifest.run_id), "mode": mode, "sent": sent}
    shown = f"{'sent as' if mode == 'online' else 'written into ' + str(run / 'wandb') + ' as'} {told['wandb']}" if sent else ""
    return Answer(told, Text(shown) if sent else "", DONE if sent else INCOMPLETE)


@app.command
def check(path: Path, /) -> Answer:
    """Show what is in a run folder or a bundle and whether it holds; exit code 1 if something does not.

    Args:
        path: A run folder, or a bundle.
    """
    if any(path.glob("*/config.json")):
        return _check_bundle(path)
    from .results.check import findings
    from .results.folder import open_run

    folder = open_run(path)
    found, manifest = findings(folder), folder.manifest
    counts = Counter(record.outcome for record in folder.records())
    played = f"{counts.total()} of {len(manifest.ledger)} episodes played"
    lines = [
        f"{path}: {manifest.suite}, {manifest.policy}; {played}: {_outcomes(counts)}",
        *(f"- {line}" for line in found or ["it holds"]),
    ]
    data = {"run": manifest.run_id, "folder": str(path), "episodes": counts.total(), "planned": len(manifest.ledger), "findings": found}
    return Answer(data, Text("\n".join(lines)), INCOMPLETE if found else DONE)


def _check_bundle(path: Path) -> Answer:
    from .engines.bundle import findings, open_bundle, uncovered

    bundle = open_bundle(path)
    found, loose = findings(bundle), uncovered(bundle)
    lines = [
        f"{path}: {bundle.model}, {bundle.options['dtype']}, {bundle.frontend}, export {bundle.export_id}, digest {bundle.digest[:12]}",
        *(f"- {name}: {len(component.config['artifacts'])} artifacts" for name, component in bundle.components.items()),
        *(f"- {name} {digest[:12]} (no identity covers it)" for name, digest in loose.items()),
        *(f"- {line}" for line in found or ["it holds"]),
    ]
    data = {
        "bundle": str(path), "model": bundle.model, "export_id": bundle.export_id, "digest": bundle.digest, "frontend": bundle.frontend,
        "options": bundle.options, "components": sorted(bundle.components), "not_covered": loose, "findings": found,
    }  # fmt: skip
    return Answer(data, Text("\n".join(lines)), INCOMPLETE if found else DONE)


dataset = App(name="dataset", help="Datasets in LeRobot's form, as GR00T N1.7 reads them: write, check, replay.")
app.command(dataset)


@dataset.command(name="write")
def dataset_write(
    runs: tuple[Path, ...],
    /,
    *,
    out: Path,
    convention: Literal["libero_sim", "env"] = "libero_sim",
    only: Literal["all", "successes", "failures"] = "all",
    size: int = 256,
    no_video: Flag = False,
    append: Flag = False,
    fps: float | None = None,
    robot: str = "panda",
    format_: Annotated[Literal["v2.1", "v3.0"], Parameter(name="--format")] = "v2.1",
) -> Answer:
    """Write the episodes of run folders as a LeRobot dataset, with a video a camera drawn from their recorded states.

    Args:
        runs: Run folders; their episodes follow one another. Episodes that ended in an error are left out.
        out: The dataset's folder; it must not exist, except with --append.
        convention: What numbers and pictures mean: as NVIDIA's LIBERO sets (gripper 1 = open, pictures mirrored), or as the environment.
        only: Which episodes.
        size: Height and width of the pictures in pixels, even.
        no_video: Write no videos; nothing is drawn then.
        append: Add the episodes to a dataset that was written before.
        fps: Control steps a second, for runs that do not say it; another rate than the run's is refused.
        robot: What info.json calls the robot.
        format_: The layout: v2.1 is what GR00T N1.7 reads, v3.0 what current LeRobot reads.
    """
    from .results.folder import Episode, open_run
    from .results.lerobot import Draw, write
    from .run import render as rendering

    @contextlib.contextmanager
    def studio(folder: RunFolder, task: str, pixels: int) -> Iterator[Draw]:
        with rendering.scene(folder, task, pixels) as env:

            def draw(episode: Episode) -> Iterator[Mapping[str, Any]]:
                return rendering.frames(env, episode)

            yield draw

    with _meter() as progress:
        done = write(
            [open_run(run) for run in runs], out, convention=convention, only=only, size=size, studio=None if no_video else studio,
            fps=fps, robot=robot, append=append, version=format_, progress=progress,
        )  # fmt: skip
    left = "".join(f"; {count} left out ({why})" for why, count in done.left_out.items())
    told = f"{out}: {done.episodes} episodes, {done.frames} rows written{left}; it holds {done.total_episodes} and {done.total_frames} now"
    return Answer(
        {
            "dataset": str(out), "episodes": done.episodes, "frames": done.frames, "total_episodes": done.total_episodes,
            "total_frames": done.total_frames, "left_out": dict(done.left_out),
        },
        told,
    )  # fmt: skip


@dataset.command(name="check")
def dataset_check(
    path: Path, /, *, against: Path | None = None, strict: Flag = False, no_video: Flag = False, horizon: int | None = None
) -> Answer:
    """Check a LeRobot dataset rule by rule: metadata, every row, every video frame, statistics. Exit code 1 if there are errors.

    Args:
        path: A dataset's folder.
        against: A bundle of GR00T, or of pi0.5 for LIBERO: its groups, cameras and bounds are compared with the dataset's.
        strict: Warnings count as errors.
        no_video: Decode no videos.
        horizon: Actions in a chunk; shorter episodes are reported. [default: the bundle's, or 16]
    """
    from .results.lerobot_check import HORIZON, check
    from .results.lerobot_policy import read_needs

    needs = read_needs(against) if against else None
    with _meter() as progress:
        found = list(check(path, needs=needs, horizon=horizon or HORIZON, videos=not no_video, progress=progress))
    counts = Counter(finding.severity for finding in found)
    summary = f"{path}: {counts['error']} errors, {counts['warning']} warnings" if found else f"{path}: nothing is wrong"
    bad = counts["error"] > 0 or (strict and counts["warning"] > 0)
    data = {
        "dataset": str(path), "errors": counts["error"], "warnings": counts["warning"],
        "findings": [
            {"severity": one.severity, "rule": one.rule, "file": one.file, "row": one.row, "text": one.text} for one in found
        ],
    }  # fmt: skip
    return Answer(data, "\n".join([*map(str, found), summary]), INCOMPLETE if bad else DONE)


@dataset.command(name="replay")
def dataset_replay(
    path: Path, /, *, task: str, episodes: str | None = None, convention: Literal["libero_sim", "env"] | None = None, seed: int = 0
) -> Answer:
    """Play a dataset's actions in the simulator again: whether they succeed, when, and how far the hand leaves the recorded path.

    Args:
        path: A dataset's folder.
        task: The suite it belongs to, or some of its tasks: libero_object, libero_10/3, libero_10@gr00t/0-4.
        episodes: Which, such as 0-9 or 3,7. [default: all]
        convention: What its actions mean. [default: what the dataset says, if vla-eval wrote it]
        seed: For episodes that no run of ours recorded: the run's seed from which fixtures are placed.
    """
    from .results.lerobot_meta import open_dataset
    from .run.replay import meaning, plan, replay

    opened = open_dataset(path)
    said = meaning(opened, convention)
    planned = plan(opened, registry.select_tasks(task), None if episodes is None else _numbers(episodes), seed=seed)
    found = []
    with _progress(f"replaying {path.name}", len(planned)) as advance:
        for one in replay(opened, planned, said):
            found.append(one)
            advance(f"episode {one.planned.record.index}: {'success' if one.success else one.error or 'no success'}", "")
    table = Table("episode", "task", "trial", "recorded", "replayed", "states", "hand apart", title_justify="left")
    table.title = f"{path}, convention {said.name}: {sum(one.success for one in found)}/{len(found)} succeed"
    for one in found:
        record, states = one.planned.record, {True: "identical", False: "differ", None: "–"}[one.identical]
        went = one.error or f"{'success' if one.success else 'no success'} at {one.steps}"
        was = f"{one.planned.recorded or '?'} at {record.length}"
        table.add_row(str(record.index), one.planned.task.id, str(one.planned.trial), was, went, states, f"{100 * one.apart:.1f} cm")
    data = {
        "dataset": str(path), "convention": said.name, "success": sum(one.success for one in found),
        "holds": sum(one.holds for one in found),
        "episodes": [
            {
                "episode": one.planned.record.index, "task": one.planned.task.id, "trial": one.planned.trial,
                "recorded": one.planned.recorded, "length": one.planned.record.length, "success": one.success, "steps": one.steps,
                "identical": one.identical, "apart_m": one.apart, "holds": one.holds, "error": one.error,
            }
            for one in found
        ],
    }  # fmt: skip
    return Answer(data, table, DONE if all(one.holds for one in found) else INCOMPLETE)


@dataset.command(name="stats")
def dataset_stats(path: Path, /) -> Answer:
    """Write a dataset's meta/stats.json anew from all its rows, in two passes: exact quantiles in bounded memory.

    Args:
        path: A dataset's folder.
    """
    from .results.lerobot_meta import open_dataset
    from .results.lerobot_stats import write_stats

    with _meter() as progress:
        found = write_stats(open_dataset(path), progress)
    return Answer(
        {"dataset": str(path), "features": {name: len(fields["mean"]) for name, fields in found.items()}},
        f"{path}/meta/stats.json: {', '.join(found)}",
    )


def _numbers(text: str) -> list[int]:
    """0-4,7 as numbers."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(1_000_000):
            raise BadRequest(f"--episodes {text}: {part!r} is neither a number nor a range; write, say, 0-4,7")
        found.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


@contextlib.contextmanager
def _meter() -> Iterator[Told]:
    """A bar on a terminal for work that says what it does, how much is done, of how much; elsewhere nothing."""
    if not stderr.is_terminal:
        yield silent
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr) as progress:
        bar = progress.add_task("", total=None)  # moves until somebody says how much there is
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)


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


@app.command
def doctor(*, certify: Flag = False, suite: Words = ()) -> Answer:
    """Say what works on this machine, what does not, and the command that mends it; exit code 1 if something needed fails.

    Args:
        certify: Measure by effect, in some minutes, whether pictures, physics, actions and success are those that scores mean.
        suite: What to certify: libero_10. Several --suite certify several. [default: the cheapest suite that shows all]
    """
    from .doctor import checks, measured, probes

    if suite and not certify:
        raise BadRequest("--suite goes with --certify")
    planned = probes(suite) if certify else None
    found = checks()
    table = Table("", "what", "found", "what mends it", show_header=False, box=None)
    for check in found:
        table.add_row(_STATES[check.state], Text(check.name), Text(check.found, overflow="fold"), Text(check.mend, overflow="fold"))
    failed = any(check.state == "fail" for check in found)
    data: dict[str, Any] = {"checks": [check._asdict() for check in found]}
    if planned is None:
        return Answer(data, table, INCOMPLETE if failed else DONE)
    lines = []
    for probe in planned:
        with _busy(f"measuring {probe.name}"):
            lines.append(measured(probe))
    columns = ["", "what", "measured", "expected", *(["likely cause"] if any(line.cause for line in lines) else [])]
    certificate = Table(*columns, box=None, title="certificate", title_justify="left")
    for line in lines:
        texts = [Text(text, overflow="fold") for text in (line.name, line.measured, line.expected, line.cause)]
        certificate.add_row(_STATES[line.state], *texts[: len(columns) - 1])
    failed |= any(line.state != "pass" for line in lines)
    data["certificate"] = [line._asdict() for line in lines]
    return Answer(data, Group(table, Text(), certificate), INCOMPLETE if failed else DONE)


_STATES = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]", "error": "[red]ERROR[/]", "absent": "[yellow]absent[/]"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 incomplete or failed, 2 a request that cannot be met, 130 interrupted.

    SIGTERM ends a command as Ctrl-C does, with exit code 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    logging.basicConfig(level=logging.WARNING, handlers=[_Lines()])
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a home that it cannot write to costs two warnings, and nothing else
    with _stdout_for_results(as_json) as out, _terminable():
        spoken = StringIO() if as_json else out
        try:
            answer = app(
                words,
                console=Console(file=spoken),
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
                help_on_error=False,
            )
        except (VlaEvalError, CycloptsError) as error:
            answer = _refusal(error)
        except KeyboardInterrupt as stop:
            answer = Answer({"error": str(stop) or _how(stop)}, "", INCOMPLETE if isinstance(stop, _Terminated) else INTERRUPTED)
        if answer is None:  # --help and --version have spoken
            if not isinstance(spoken, StringIO):
                return DONE
            answer = Answer({"version" if "--version" in words else "help": spoken.getvalue().rstrip("\n")}, "")
        if isinstance(message := answer.data.get("error"), str):
            stderr.print(Text(f"vla-eval: {message}"))
        try:
            _tell(answer, out, as_json)
        except BrokenPipeError:  # `vla-eval list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        return int(answer.exit)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: whoever cleans up after Ctrl-C cleans up after this."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise where the program stands, as Ctrl-C does; a caller's own handling of it is left alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(*_: object) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _how(stop: KeyboardInterrupt) -> str:
    return "terminated" if isinstance(stop, _Terminated) else "interrupted"


def _refusal(error: Exception) -> Answer:
    return Answer({"error": " ".join(str(error).split())}, "", REFUSED)


def _tell(answer: Answer, out: TextIOWrapper, as_json: bool) -> None:
    if as_json:
        out.write(json.dumps({**answer.data, "exit": answer.exit}, ensure_ascii=False, allow_nan=False) + "\n")
    elif isinstance(answer.shown, str):  # lines as they are, however long
        out.write(answer.shown + "\n" if answer.shown else "")
    else:
        console = Console(file=out, highlight=False, width=None if out.isatty() else 160)
        with console.capture() as text:
            # Markdown in a file keeps its lines: a table row that is broken in two is none.
            console.print(answer.shown, soft_wrap=isinstance(answer.shown, Page) and not out.isatty())
        out.write(text.get())
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
