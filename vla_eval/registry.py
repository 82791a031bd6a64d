"""Names to things, through entry points: policies, recipes and tasks, ours and anybody else's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .types import BadRequest, Policy, Task, VlaEvalError

POLICIES, RECIPES, TASKS = "vla_eval.policies", "vla_eval.recipes", "vla_eval.tasks"


def load_policy(name: str, bundle: Any = None, **options: Any) -> Policy:
    """The policy of that name, loaded. Options are checked against the signature of its `load(bundle=None, **options)`."""
    load = _load(POLICIES, name)
    check_options(f"policy {name!r}", load, {"bundle": bundle, **options})
    policy: Policy = load(bundle=bundle, **options)
    return policy


def load_recipe(name: str) -> Callable[..., Any]:
    """The function `recipe(checkpoint, out, **options)` that turns a checkpoint of that model into a bundle."""
    recipe: Callable[..., Any] = _load(RECIPES, name)
    return recipe


def load_tasks(name: str) -> list[Task]:
    """The tasks of a suite: "libero_10@openpi" by its full name, "libero_10" under its first, the default, protocol.

    Raises BadRequest, with the near miss, for an unknown suite or protocol.
    """
    suite, _, protocol = name.partition("@")
    tasks = _all_tasks(suite)
    protocols = list(dict.fromkeys(task.suite for task in tasks))
    wanted = f"{suite}@{protocol}" if protocol else protocols[0]
    if wanted not in protocols:
        raise BadRequest(unknown("protocol", protocol, [p.partition("@")[2] for p in protocols], f"of suite {suite!r}"))
    return [task for task in tasks if task.suite == wanted]


def names(group: str) -> list[str]:
    """Every registered name of a group, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def suites() -> dict[str, list[str]]:
    """Suite -> its protocols' full names, the default first; imports no simulator."""
    return {suite: list(dict.fromkeys(task.suite for task in _all_tasks(suite))) for suite in names(TASKS)}


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> str:
    """The sentence for a name that nobody registered, with the near miss if there is one."""
    known = list(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}."
    return " ".join(part for part in (f"unknown {kind} {name!r}", where) if part) + f"; {hint}"


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


def _all_tasks(suite: str) -> Sequence[Task]:
    found = _load(TASKS, suite)
    tasks: Sequence[Task] = found() if callable(found) else found
    if not tasks:
        raise VlaEvalError(f"suite {suite!r} has no tasks; its plug-in registers an empty sequence")
    return tasks


def _load(group: str, name: str) -> Any:
    kind = {POLICIES: "policy", RECIPES: "model", TASKS: "suite"}[group]
    points = [point for point in entry_points(group=group) if point.name == name]
    if not points:
        raise BadRequest(unknown(kind, name, names(group)))
    owners = {(point.dist.name if point.dist else "?", point.value) for point in points}
    if len(owners) > 1:
        told = ", ".join(sorted(f"{dist} ({value})" for dist, value in owners))
        raise BadRequest(f"{kind} {name!r} is registered twice: {told}. Uninstall one of them")
    return _import(kind, points[0])


def _import(kind: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        owner = point.dist.name if point.dist else "unknown distribution"
        raise VlaEvalError(
            f"{kind} {point.name!r} of {owner} cannot be imported ({point.value}): {type(error).__name__}: {error}. "
            f"Reinstall or remove {owner}"
        ) from error
