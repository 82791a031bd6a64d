"""How long requests take, stage by stage, after a warm-up that is counted and left out; and what plain PyTorch takes in the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..types import BadRequest, VlaEvalError

WARM_UP = 20  # requests: the first of a shape compiles, the second is captured
HOST = ("pack", "fill", "unpack")  # stages of the processor; on a GPU all others are the card's
RIVALS = Path(__file__).resolve().parents[2] / "benchmarks/rivals"  # in a checkout; a wheel has none
RIVAL_ARM = "lean-graph"  # the network as our engines cut it, captured whole as one CUDA graph
_CUDA = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'no CUDA')"


class Rehearsal(NamedTuple):
    """What a policy offers for timing: requests made from its bundle's contract, as many as the engines answer together."""

    answer: Callable[[], Mapping[str, float]]  # answers all of them once: seconds by stage, HOST's among them
    rows: Sequence[Any]  # the same requests as the policy's runtime takes them
    about: Mapping[str, Any]  # "batch", "views", "tokens", "steps"
    rival: Mapping[str, Any] | None  # arguments by which a script of RIVALS does the same work; None: none has these sizes


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests one after another."""

    requests: int  # that count
    warm_up: int  # that do not
    warm_up_s: float
    seconds: Mapping[str, Sequence[float]]  # stage -> one number a request; "whole" is the wall's


def measure(answer: Callable[[], Mapping[str, float]], *, requests: int, warm_up: int = WARM_UP, on_card: bool) -> Measured:
    """Time a rehearsal's `answer`. With `on_card` the card's stages come as their sum too, "gpu", and the rest of "whole" as "host".

    Raises BadRequest for less than one request.
    """
    if requests < 1 or warm_up < 0:
        raise BadRequest(f"{requests} requests after {warm_up} of warm-up cannot be measured; give at least 1 and 0")
    seconds: dict[str, list[float]] = {}
    began = time.perf_counter()
    for _ in range(warm_up):
        answer()
    warm = time.perf_counter() - began
    for _ in range(requests):
        began = time.perf_counter()
        stages = answer()
        whole = time.perf_counter() - began
        gpu = sum(spent for stage, spent in stages.items() if stage not in HOST)
        for stage, spent in {**stages, **({"gpu": gpu, "host": whole - gpu} if on_card else {}), "whole": whole}.items():
            seconds.setdefault(stage, []).append(spent)
    return Measured(requests, warm_up, warm, seconds)


def rival(model: str, arguments: Mapping[str, Any], *, scripts: Path = RIVALS) -> dict[str, Any]:
    """The same network in PyTorch, captured as one CUDA graph, in a process of its own: GPU milliseconds of each part.

    {"arm", "torch", "gpu", "command", "parts": {part: {"p50", "p99"}}}; the part "e2e" is a whole request. Raises BadRequest where the
    scripts, PyTorch or a GPU are not to be had, VlaEvalError where the script fails.
    """
    script = scripts / f"torch_baseline_{model}.py"
    if not script.is_file():
        raise BadRequest(
            f"the PyTorch baseline {script.name} is in a checkout's benchmarks/rivals and in no installed package; "
            "run from a checkout, installed with pip install -e ."
        )
    if find_spec("torch") is None:
        raise BadRequest("PyTorch is not installed here, so there is nothing to hold the bundle against; pip install torch transformers")
    if subprocess.run([sys.executable, "-c", _CUDA], capture_output=True, check=False).returncode:
        raise BadRequest("PyTorch finds no CUDA here; its baseline needs a GPU and a PyTorch that is built for it")
    options = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(script), "--arms", RIVAL_ARM, *options]
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}  # where it would leave files
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line.removeprefix("JSON ") for line in done.stdout.splitlines() if line.startswith("JSON ")]
    rows = json.loads(lines[-1])["rows"] if lines else []
    failed = [f"{row['part']}: {row['error']}" for row in rows if "error" in row]
    if done.returncode or not rows or failed:
        told = "; ".join(failed) or (done.stderr.strip().splitlines() or ["it printed no result"])[-1]
        raise VlaEvalError(f"{script} failed: {told}; run it by hand: {' '.join(command)}")
    said = json.loads(lines[-1])
    parts = {row["part"]: {"p50": row["ms"], "p99": row["p99"]} for row in rows if row["arm"] == RIVAL_ARM}
    return {"arm": RIVAL_ARM, "torch": said["torch"], "gpu": said.get("gpu"), "command": command[1:], "parts": parts}
