"""The command line over the real simulator: what is left on stderr when a process that drew ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.libero

# A policy that looks, and whose second answer of trial 1 breaks if it is told so.
CODE = """
import sys
from dataclasses import dataclass, field
import numpy as np
from vla_eval import ActionChunk, Interface, cli, registry
from vla_eval.types import ARM_ACTION

@dataclass(frozen=True)
class Looking:
    breaks: bool
    name: str = "looking"
    needs: Interface = Interface(cameras={"agentview": (256, 256)}, state={}, action=ARM_ACTION, control_hz=20)
    horizon: int = 140

    def act(self, batch):
        assert all(request.observation["images"]["agentview"].any() for request in batch)
        if self.breaks and any(request.step for request in batch):
            raise RuntimeError("the network is gone")
        return [ActionChunk(np.zeros((140, 7))) for _ in batch]

registry.load_policy = lambda name, **options: Looking(name == "breaks")
sys.exit(cli.main(sys.argv[1:]))
"""


def command(policy: str, trials: int) -> list[str]:
    words = ["run", "--task", "libero_object/0", "--policy", policy, "--trials", str(trials), "--workers", "1", "--json"]
    return [sys.executable, "-c", CODE, *words]


@pytest.mark.parametrize(("policy", "code", "outcome"), [("looks", 0, "failure"), ("breaks", 1, "error")], ids=["good", "error"])
def test_a_run_that_drew_ends_without_a_word_from_the_renderer(tmp_path: Path, policy: str, code: int, outcome: str) -> None:
    done = subprocess.run(command(policy, 1), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)[outcome] == 1
    (line,) = done.stderr.splitlines()
    assert f"libero_object@openpi/0 trial 0: {outcome}" in line


def test_ctrl_c_while_the_simulator_runs_leaves_one_sentence(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("looks", 3), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert "trial 0: failure" in first
    assert process.returncode == json.loads(out)["exit"] == 130
    assert err.splitlines()[-1].startswith("vla-eval: interrupted after 1 of 3 episodes; go on with: vla-eval run --resume videos/")
    assert "Traceback" not in err
    assert "Exception ignored" not in err
