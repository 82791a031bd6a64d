"""What a light command must not load."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("mujoco", "robosuite", "libero", "cv2", "onnx", "onnxruntime", "wandb", "tensorrt", "tensorrt_rtx", "matplotlib", "torch")


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh Python has after `code`."""
    code += "\nsys.stderr.write('\\nLOADED ' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=True)
    return set(done.stderr.rpartition("LOADED ")[2].split())


def test_light_commands_load_nothing_heavy() -> None:
    commands = [["--version"], ["--help"], ["runn"], ["run", "--help"], ["list"], ["list", "--json"]]
    watched = f"""
from vla_eval.cli import main
for words in {commands!r}:
    main(words)
    heavy = {set(HEAVY)!r} & set(sys.modules)
    assert not heavy, (words, heavy)
"""
    assert "cyclopts" in loaded(watched)


def test_the_package_itself_loads_neither_a_simulator_nor_a_command_line() -> None:
    assert not loaded("import vla_eval") & {*HEAVY, "cyclopts", "rich", "scipy"}


def test_a_simulator_process_loads_no_engine_and_no_command_line() -> None:
    ours = "import vla_eval.run.worker, vla_eval.run.render\nassert not {'vla_eval.engines', 'vla_eval.cli'} & set(sys.modules)"
    assert not loaded(ours) & {"onnx", "onnxruntime", "wandb", "tensorrt", "cyclopts", "rich"}
