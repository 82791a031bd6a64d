"""Who ran what, where, from which commit: a run's manifest, and what of a run is no longer as it was."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..results.difference import ABSENT, places
from ..results.folder import SCHEMA
from ..types import Policy, RunManifest, Task

DISTRIBUTION = "vla-eval-trt"
SEEDING = "first 32 bits of sha256('<seed>/<task>/<trial>[/<chunk>]')"
_CODE = ("vla_eval", "envs", "policies", "tasks", "pyproject.toml")  # what of a checkout a result can depend on


def build(
    policy: Policy,
    tasks: Sequence[Task],
    ledger: Sequence[tuple[str, int]],
    *,
    trials: int,
    seed: int,
    batch: int,
    replan: int,
    replan_source: str,
    command: Sequence[str],
    options: Mapping[str, Any],
    bundle: str | None,
    backend: str,
    engines: Mapping[str, Any],
) -> RunManifest:
    """The manifest of a new run; what only a simulator knows is added when the first one stands."""
    now = datetime.now(UTC)
    suite = tasks[0].suite
    return RunManifest(
        schema=SCHEMA,
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{_plain(suite)}-{_plain(policy.name)}-{secrets.token_hex(2)}",
        created=now.isoformat(timespec="seconds"),
        command=list(command),
        suite=suite,
        policy=policy.name,
        privileged=policy.needs.privileged,
        bundle=bundle,
        backend=backend,
        engines=engines,
        trials=trials,
        seed=seed,
        batch=batch,
        replan=replan,
        ledger=ledger,
        protocol=protocol(tasks, replan_source),
        options=options,
        versions=versions(),
        revision=revision(),
        hardware=hardware(),
    )


def protocol(tasks: Sequence[Task], replan_source: str) -> dict[str, Any]:
    """Every number that a score depends on, by task. `starts` (a digest) and `control_hz` are a simulator's to say."""
    return {
        "seeding": SEEDING,
        "replan": replan_source,
        "tasks": {
            task.id: {
                "env": task.env,
                "instruction": task.instruction,
                "max_steps": task.max_steps,
                "trials": task.trials,
                "env_kwargs": dict(task.env_kwargs),
                "starts": None,
                "control_hz": None,
            }
            for task in tasks
        },
    }


def versions() -> dict[str, str]:
    """Python and numpy: states of two runs are comparable to the bit under the same ones only."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("numpy", "gymnasium")}}


@cache  # what runs is what was loaded, whatever is edited meanwhile
def revision() -> dict[str, Any]:
    """Which vla-eval this is: its version and, from a checkout, the commit and whether the code differs from it."""
    try:
        found: dict[str, Any] = {"version": version(DISTRIBUTION)}
    except PackageNotFoundError:
        found = {"version": "unknown"}
    root = Path(__file__).resolve().parents[2]
    if _git(root, "ls-files", "--error-unmatch", "vla_eval/types.py") is None:
        return found | {"commit": None, "dirty": False}
    commit, difference = _git(root, "rev-parse", "HEAD"), _git(root, "diff", "HEAD", "--", *_CODE)
    found |= {"commit": commit, "dirty": bool(difference)}
    if difference:
        found["difference"] = hashlib.sha256(difference.encode()).hexdigest()[:16]
    return found


def hardware() -> dict[str, str]:
    """Processor, memory and graphics card; what draws is the simulator's to say."""
    found = {"cpu": _cpu(), "cores": str(len(os.sched_getaffinity(0))), "machine": platform.machine(), "system": platform.platform()}
    if nvidia_smi := shutil.which("nvidia-smi"):
        gpus = _output([nvidia_smi, "--query-gpu=name,driver_version", "--format=csv,noheader"])
        if gpus:
            found["gpu"] = "; ".join(gpus.split("\n"))
    return found


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Each place where two pieces of plain data differ, told: "protocol.tasks.toy@v1/0.max_steps: 60 then, 80 now"."""
    start = (where,) if where else ()
    return [
        f"{'.'.join(path)}: {ABSENT if one == ABSENT else repr(one)} then, {ABSENT if other == ABSENT else repr(other)} now"
        for path, one, other in places(before, now, start)
    ]


def changed(manifest: RunManifest, now: RunManifest) -> list[str]:
    """What of a run is no longer as it was, the revision apart: any of it would make two runs of one."""
    names = (
        "schema", "suite", "policy", "privileged", "bundle", "engines", "trials", "seed", "batch", "replan", "options", "protocol",
        "versions",
    )  # fmt: skip
    before, after = asdict(manifest), asdict(now)
    kept = {name: before[name] for name in names}
    new = {name: after[name] for name in names}
    for task, numbers in kept["protocol"].get("tasks", {}).items():  # what a simulator said is compared when one stands
        new["protocol"]["tasks"].get(task, {}).update(starts=numbers.get("starts"), control_hz=numbers.get("control_hz"))
    new["versions"] = {**kept["versions"], **new["versions"]}
    return differences(kept, new)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.@+-]", "_", name)[:80]


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _git(root: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    return _output([git, "-C", str(root), *arguments]) if git else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
