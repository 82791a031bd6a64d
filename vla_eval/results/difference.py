"""How two pieces of plain data differ; of two manifests, whether their (task, trial) are the same episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from ..types import RunManifest

OWN = ("run_id", "created", "command")  # differ between any two runs and say nothing about them
HARMLESS = ("python", "numpy", "gymnasium")  # versions under which a start is the same; all others are the simulator's
LATER = ("starts", "control_hz")  # a simulator's to say: None until the task's first one stands
ABSENT = "(absent)"


class Difference(NamedTuple):
    """One place in which two manifests differ. With `separates` the same (task, trial) is not the same episode."""

    key: str
    a: Any
    b: Any
    separates: bool


def differences(a: RunManifest, b: RunManifest) -> list[Difference]:
    """Every place in which two manifests differ, by its path; those that separate the runs come first."""
    shared = {task for task, _ in a.ledger} & {task for task, _ in b.ledger}
    found = []
    for path, one, other in places(_comparable(a), _comparable(b)):
        unknown = path[-1] in LATER and None in (one, other)
        found.append(Difference(".".join(path), one, other, not unknown and _separates(path, shared)))
    return sorted(found, key=lambda difference: not difference.separates)


def places(a: Any, b: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Each place where two pieces of plain data differ, with what each has there; ABSENT where one has nothing."""
    one, other = _listed(a), _listed(b)
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            yield from places(one.get(key, ABSENT), other.get(key, ABSENT), (*path, key))
    elif one != other:
        yield path, one, other


def _separates(path: tuple[str, ...], shared: set[str]) -> bool:
    """Whether a (task, trial) that both runs have starts or ends otherwise in the two."""
    match path:
        case ("protocol", "tasks", task, *_):
            return task in shared
        case ("protocol", "replan") | ("protocol", "tasks"):  # replan is the policy's, and shown wherever a rate is
            return False
        case ("versions", name):
            return name.lower() not in HARMLESS
        case (head, *_):
            return head in ("suite", "seed", "protocol")
    return False


def _comparable(manifest: RunManifest) -> dict[str, Any]:
    data = {name: value for name, value in asdict(manifest).items() if name not in OWN}
    data["ledger"] = {f"{task}, trial {trial}": "planned" for task, trial in manifest.ledger}  # its order decides nothing
    return data


def _listed(value: Any) -> Any:
    """As JSON gives it back, which knows no tuple."""
    if isinstance(value, Mapping):
        return {str(key): _listed(inner) for key, inner in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
