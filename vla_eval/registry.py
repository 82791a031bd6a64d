"""Names to things, through entry points: policies, recipes and tasks, ours and anybody else's."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from .types import BadRequest, Policy, Progress, Task, VlaEvalError

POLICIES, RECIPES, TASKS = "vla_eval.policies", "vla_eval.recipes", "vla_eval.tasks"
PUBLISHED = "vla_eval.published"
SYNTHS = "vla_eval.synths"
PROGRESS = "progress"  # a recipe's parameter that is told how far it is


def load_policy(name: str, bundle: Any = None, **options: Any) -> Policy:
    """The policy of that name, loaded. Options are checked against the signature of its `load(bundle=None, **options)`."""
    load = _load(POLICIES, name)
    given = options if bundle is None else {"bundle": bundle, **options}
    check_options(f"policy {name!r}", load, given)
    policy: Policy = load(**given)
    return policy


def load_recipe(name: str) -> Callable[..., Any]:
    """The function `recipe(checkpoint, out, **options)` that turns a checkpoint of that model into a bundle."""
    recipe: Callable[..., Any] = _load(RECIPES, name)
    return recipe


def load_synth(name: str) -> Callable[..., Any]:
    """The function `synth(out, **options)` that writes a checkpoint of that model's layout, of random numbers."""
    synth: Callable[..., Any] = _load(SYNTHS, name)
    return synth


def load_published(name: str) -> Callable[[str], Any] | None:
    """The function that says where a model's checkpoint for a suite is published, if its plug-in has one (see `vla_eval.bundles`)."""
    return _load(PUBLISHED, name) if name in names(PUBLISHED) else None


def load_tasks(name: str) -> list[Task]:
    """The tasks of a suite: "libero_10@openpi" by its full name, "libero_10" under its first, the default, protocol.

    Raises BadRequest, with the near miss, for an unknown suite or protocol.
    """
    suite, at, protocol = name.partition("@")
    if at and not protocol:
        raise BadRequest(f"{name!r} names no protocol after '@'; leave the '@' out for the default one")
    tasks = _all_tasks(suite)
    known = list(dict.fromkeys(task.suite for task in tasks))
    wanted = f"{suite}@{protocol}" if protocol else known[0]
    if wanted not in known:
        raise BadRequest(unknown("protocol", protocol, [name.partition("@")[2] for name in known], f"of suite {suite!r}"))
    return [task for task in tasks if task.suite == wanted]


def select_tasks(spec: str, protocol: str | None = None) -> list[Task]:
    """The tasks that "libero_10", "libero_10/3" or "libero_10@gr00t/0-4,7" means, in the suite's order; `protocol` stands for the suffix.

    Raises BadRequest, in one sentence, for unknown names, for indices that the suite lacks, and for two protocols that disagree.
    """
    name, slash, wanted = spec.partition("/")
    suite, at, suffix = name.partition("@")
    if at and protocol and suffix != protocol:
        raise BadRequest(f"{spec!r} asks for protocol {suffix!r} and --protocol for {protocol!r}; say it once")
    tasks = load_tasks(f"{suite}@{protocol}" if protocol else name)
    if not slash:
        return tasks
    known = sorted(task.index for task in tasks)
    chosen = [index for part in wanted.split(",") for index in _indices(part, spec, known, tasks[0].suite)]
    return [task for task in tasks if task.index in chosen]


def names(group: str) -> list[str]:
    """Every registered name of a group, sorted."""
    return sorted({point.name for point in _points(group)})


def suites() -> dict[str, list[str]]:
    """Suite -> its protocols' full names, the default first; imports no simulator."""
    return {suite: protocols(suite) for suite in names(TASKS)}


def protocols(suite: str) -> list[str]:
    """The full names of a suite's protocols, the default first."""
    return list(dict.fromkeys(task.suite for task in _all_tasks(suite)))


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> str:
    """The sentence for a name that nobody registered, with the near misses if there are any: the nearest, and those about as near."""
    likeness = {other: SequenceMatcher(None, name, other).ratio() for other in known}
    best = max(likeness.values(), default=0.0)
    near = [repr(other) for other, ratio in likeness.items() if ratio >= max(0.5, best - 0.08)][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(likeness) or 'none'}."
    return " ".join(part for part in (f"unknown {kind} {name!r}", where) if part) + f"; {hint}"


def with_progress(function: Callable[..., Any], progress: Progress) -> Callable[..., Any]:
    """The function with its parameter `progress` filled in, if it has one: no option of anybody's."""
    signature = inspect.signature(function)
    if PROGRESS not in signature.parameters:
        return function

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        return function(*args, progress=progress, **kwargs)

    others = [parameter for name, parameter in signature.parameters.items() if name != PROGRESS]
    told.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    told.__annotations__ = {name: kind for name, kind in function.__annotations__.items() if name != PROGRESS}
    return told


def check_options(what: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse an option that the function does not take: nothing is parsed and ignored. Raises BadRequest."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in options:
        if name not in accepted:
            raise BadRequest(unknown("option", name, [a for a in accepted if a != "bundle"], f"of {what}"))
    missing = [p.name for p in parameters if p.default is p.empty and p.name in accepted and p.name not in options]
    if missing:
        raise BadRequest(f"{what} needs --option {missing[0]}=VALUE")


def _indices(part: str, spec: str, known: list[int], suite: str) -> range:
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
    if not found:
        raise BadRequest(f"{spec!r}: {part!r} is neither an index nor a range; write, say, {suite}/3 or {suite}/0-4,7")
    first, last = int(found[1]), int(found[2] or found[1])
    if first > last:
        raise BadRequest(f"{spec!r}: the range {part!r} runs backwards; write {last}-{first}")
    for index in (first, last):
        if index not in known:
            raise BadRequest(f"{spec!r}: {suite} has no task {index}; its {len(known)} tasks are {known[0]} to {known[-1]}")
    return range(first, last + 1)


def _all_tasks(suite: str) -> Sequence[Task]:
    found = _load(TASKS, suite)
    tasks: Sequence[Task] = found() if callable(found) else found
    if not tasks:
        raise VlaEvalError(f"suite {suite!r} has no tasks; its plug-in registers an empty sequence")
    return tasks


def _load(group: str, name: str) -> Any:
    kind = {POLICIES: "policy", RECIPES: "model", TASKS: "suite", PUBLISHED: "model", SYNTHS: "model"}[group]
    points = [point for point in _points(group) if point.name == name]
    if not points:
        raise BadRequest(unknown(kind, name, names(group)))
    owners = {(point.dist.name if point.dist else "?", point.value) for point in points}
    if len(owners) > 1:
        told = ", ".join(sorted(f"{dist} ({value})" for dist, value in owners))
        raise BadRequest(f"{kind} {name!r} is registered twice: {told}. Uninstall one of them")
    return _import(kind, points[0])


def _points(group: str) -> EntryPoints:
    """The group's entry points as they are now: every distribution's metadata is read again only where one came or went."""
    return _read(group, tuple(_seen(place or ".") for place in sys.path))


def _seen(place: str) -> tuple[str, int, int]:
    """A place to import from, and what becomes another with what is installed there, as importlib.metadata itself has it."""
    try:
        state = os.stat(place)
    except OSError:
        return place, 0, 0
    return place, state.st_ino, state.st_mtime_ns


@functools.lru_cache(maxsize=16)
def _read(group: str, _: tuple[tuple[str, int, int], ...]) -> EntryPoints:
    return entry_points(group=group)


def _import(kind: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # a module's top level may raise anything: a KeyError of os.environ, an assertion
        owner = point.dist.name if point.dist else "unknown distribution"
        raise VlaEvalError(
            f"{kind} {point.name!r} of {owner} cannot be imported ({point.value}): {type(error).__name__}: {error}. "
            f"Reinstall or remove {owner}"
        ) from error
