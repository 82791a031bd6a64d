"""This machine: what works, what does not, and the command that mends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from . import __version__, registry
from .types import BadRequest, Check, EpisodeRecord, Probe, Task, VlaEvalError

ROOM_LINKS = ("envs", "policies", "tasks")
SIMULATOR_GB = 2.2  # one LIBERO process that draws
DISK_GB = 2.0  # a run of 500 episodes with films


def checks() -> list[Check]:
    """Every line: Python and this installation, every registered suite and what its environments say, engines, GPU, film, memory, disk."""
    return [_python(), _installation(), *_suites(), *_tensorrt(), _gpu(), _ffmpeg(), _memory(), _disk()]


class Certified(NamedTuple):
    """One line of a certificate. An error is no failure: the line could not be measured."""

    name: str
    state: Literal["pass", "fail", "error"]
    measured: str
    expected: str
    cause: str = ""


def probes(suites: Sequence[str] = ()) -> Iterator[Probe]:
    """What the environments' modules can measure of `suites`; no suites means each module's own choice.

    Raises BadRequest, before the first probe, for a suite that is unknown or that nobody can certify, and if nobody certifies anything.
    """
    asked: dict[str, list[str]] = {}
    for suite in suites or registry.names(registry.TASKS):
        if "@" in suite:
            raise BadRequest(f"--suite {suite}: suites are certified under their default protocol; write {suite.partition('@')[0]}")
        for module in dict.fromkeys(task.env.rpartition(":")[0] for task in registry.load_tasks(suite)):
            asked.setdefault(module, []).append(suite)
    found: list[Iterator[Probe]] = []
    for module, names in asked.items():
        certify = getattr(import_module(module), "certify", None) if module else None
        if certify is not None:
            found.append(certify(names if suites else (), _play))
        elif suites:
            raise BadRequest(f"--suite {names[0]}: {module or 'its environments'} cannot certify; choose another suite")
    if not found:
        raise BadRequest("--certify: nothing installed here offers anything to certify")
    return chain.from_iterable(found)


def measured(probe: Probe) -> Certified:
    """The probe's line. Whatever it raises is the line's error, and nobody else's."""
    from .run.episode import guarded, told

    result, error = guarded(probe.measure)
    if error is not None:
        return Certified(
            probe.name, "error", told(error), probe.expected, probe.broken or "see the message: it broke before anything could be measured"
        )
    assert result is not None
    state: Literal["pass", "fail"] = "pass" if result.holds else "fail"
    return Certified(probe.name, state, result.found, probe.expected, "" if result.holds else result.cause)


def _play(env: Any, task: Task, policy: str) -> EpisodeRecord:
    from .run.episode import in_process, rollout

    player = registry.load_policy(policy)
    return rollout(env, in_process(player), task, player.needs, trial=0, seed=0, replan=player.horizon)


def _python() -> Check:
    found = sys.version.split()[0]
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Check("Python", "pass", found)
    return Check("Python", "fail", f"{found}; 3.11, 3.12 or 3.13 is needed", "python3.12 -m venv .venv")


def _installation() -> Check:
    package = Path(__file__).parent
    for name in ROOM_LINKS:
        if not (package / name).is_dir():  # git writes a small file where it may not make a link
            found = f"{package / name} is no link to {name}/: the checkout was made without symbolic links"
            return Check(
                "vla-eval", "fail", found, "git config core.symlinks true && git checkout -- vla_eval, on a file system that has them"
            )
    owners = sorted(set(packages_distributions().get("vla_eval", [])))
    if len(owners) > 1:
        others = " ".join(name for name in owners if name != "vla-eval-trt")
        found = f"{' and '.join(owners)} lie over each other: one import name, one command"
        return Check("vla-eval", "fail", found, f"pip uninstall {others}; pip install --force-reinstall --no-deps vla-eval-trt")
    return Check("vla-eval", "pass", f"vla-eval-trt {__version__} in {package}")


def _suites() -> Iterator[Check]:
    modules: dict[str, None] = {}  # in order, each once
    for suite in registry.names(registry.TASKS):
        try:
            found = [task for protocol in registry.protocols(suite) for task in registry.load_tasks(protocol)]
        except VlaEvalError as error:
            yield Check(f"suite {suite}", "fail", str(error), "see the sentence")
            continue
        modules |= dict.fromkeys(task.env.rpartition(":")[0] for task in found)
        yield Check(
            f"suite {suite}", "pass", f"{len({task.index for task in found})} tasks, {len({task.suite for task in found})} protocols"
        )
    for module in filter(None, modules):
        try:
            asked = getattr(import_module(module), "checks", None)
        except ImportError as error:
            yield Check(module, "fail", f"cannot be imported ({error})", "install what it names")
            continue
        yield from asked() if asked else ()


def _tensorrt() -> Iterator[Check]:
    flavours = {"tensorrt": "tensorrt", "tensorrt-rtx-cu13": "rtx"}
    found = {name: told for name in flavours if (told := _version(name))}
    if old := [f"{name} {told}" for name, told in found.items() if name == "tensorrt" and int(told.partition(".")[0]) < 11]:
        yield Check("TensorRT", "fail", f"{old[0]}; 11.x is needed", "pip install 'vla-eval-trt[tensorrt]'")
    elif found:
        yield Check("TensorRT", "pass", ", ".join(f"{name} {told}" for name, told in found.items()))
    else:
        yield Check("TensorRT", "absent", "engines run on ONNX Runtime only", "pip install 'vla-eval-trt[tensorrt]', or [rtx]")
    bindings = _version("cuda-bindings") or _version("cuda-python")
    yield (
        Check("cuda-python", "pass", bindings)
        if bindings
        else Check("cuda-python", "absent", "TensorRT needs it to run a plan", "pip install 'vla-eval-trt[tensorrt]', or [rtx]")
    )


def _gpu() -> Check:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("GPU", "absent", "no nvidia-smi: policies run on the CPU", "install NVIDIA's driver, if there is a card")
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("GPU", "fail", f"nvidia-smi does not answer ({error})", "reboot, or reinstall NVIDIA's driver")
    return Check("GPU", "pass", "; ".join(done.stdout.strip().splitlines()))


def _ffmpeg() -> Check:
    mend = "pip install --force-reinstall imageio-ffmpeg"
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        command = get_ffmpeg_exe()
        done = subprocess.run([command, "-hide_banner", "-encoders"], capture_output=True, text=True, timeout=30, check=True)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Check("ffmpeg", "fail", f"no films ({error})", mend)
    if " libx264 " not in done.stdout:
        return Check("ffmpeg", "fail", f"{command} has no libx264", f"unset IMAGEIO_FFMPEG_EXE, or {mend}")
    return Check("ffmpeg", "pass", command)


def _memory() -> Check:
    from .run.loop import free_bytes

    free = free_bytes()
    if free is None:
        return Check("memory", "absent", "the system does not say how much is free", "give --workers with care")
    simulators = int(free / 1e9 / SIMULATOR_GB)
    found = f"{free / 1e9:.1f} GB free, enough for {simulators} LIBERO worker{'s' * (simulators != 1)} that draw"
    return Check("memory", "pass" if simulators else "fail", found, "" if simulators else "end other programs")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    found = f"{free:.1f} GB free in {Path.cwd()}"
    if not os.access(Path.cwd(), os.W_OK):
        return Check("disk", "fail", f"{Path.cwd()} cannot be written to", "run elsewhere, or name a folder with --out")
    return Check(
        "disk", "pass" if free > DISK_GB else "fail", found, "" if free > DISK_GB else "make room, or name another disk with --out"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
