"""The doctor's lines: what fails, and the command that mends it."""

from __future__ import annotations

import json
import stat
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest

from vla_eval import cli, doctor, registry
from vla_eval.types import BadRequest, Check, Task


def test_every_line_that_does_not_pass_says_what_mends_it() -> None:
    lines = doctor.checks()
    names = [line.name for line in lines]
    assert len(set(names)) == len(names)
    assert {
        "Python",
        "vla-eval",
        "suite toy",
        "suite libero_10",
        "mujoco",
        "robosuite",
        "TensorRT",
        "GPU",
        "ffmpeg",
        "memory",
        "disk",
    } <= set(names)
    for line in lines:
        assert line.state in ("pass", "fail", "absent")
        assert line.found
        assert line.state == "pass" or line.mend
    assert [line.state for line in lines if line.name in ("Python", "vla-eval", "suite toy", "ffmpeg")] == ["pass"] * 4


@pytest.mark.parametrize(("states", "code"), [("pass absent", 0), ("pass fail absent", 1)])
def test_exit_code_1_if_something_needed_fails(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, states: str, code: int
) -> None:
    lines = [Check(state, state, "[what] was found", "do this") for state in states.split()]  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "checks", lambda: lines)
    assert cli.main(["doctor", "--json"]) == code
    told = json.loads(capfd.readouterr().out)
    assert told == {"checks": [line._asdict() for line in lines], "exit": code}
    assert cli.main(["doctor"]) == code
    assert "[what] was found" in capfd.readouterr().out  # and no markup


def test_a_checkout_without_links_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").write_text("../envs")  # what git writes where it may not make a link
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "doctor.py"))
    line = doctor._installation()
    assert line.state == "fail"
    assert f"{tmp_path / 'envs'} is no link" in line.found
    assert "core.symlinks" in line.mend


def test_the_other_project_of_that_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "packages_distributions", lambda: {**packages_distributions(), "vla_eval": ["vla-eval-trt", "vla-eval"]})
    line = doctor._installation()
    assert line.state == "fail"
    assert "pip uninstall vla-eval;" in line.mend


def test_environments_of_any_package_have_their_say(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kitchen_envs")
    module.checks = lambda: [Check("kitchen sink", "fail", "leaks", "a new washer")]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kitchen_envs", module)
    tasks = [Task(f"kitchen@v1/{index}", "kitchen_envs:me/Kitchen-v0", "cook", max_steps=3) for index in range(2)]
    monkeypatch.setattr(registry, "names", lambda group: ["kitchen"])
    monkeypatch.setattr(registry, "_all_tasks", lambda suite: tasks)
    assert list(doctor._suites()) == [
        Check("suite kitchen", "pass", "2 tasks, 1 protocols"),
        Check("kitchen sink", "fail", "leaks", "a new washer"),
    ]


def test_a_suite_or_environment_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_tasks(suite: str) -> list[Task]:
        if suite == "broken":
            raise BadRequest("suite 'broken' cannot be imported")
        return [Task("gone@v1/0", "no_such_module:X-v0", "go", max_steps=3)]

    monkeypatch.setattr(registry, "names", lambda group: ["broken", "gone"])
    monkeypatch.setattr(registry, "_all_tasks", all_tasks)
    broken, gone, module = doctor._suites()
    assert (broken.state, broken.found) == ("fail", "suite 'broken' cannot be imported")
    assert gone.state == "pass"
    assert (module.name, module.state) == ("no_such_module", "fail")


def test_tensorrt_by_flavour_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(**installed: str) -> Check:
        monkeypatch.setattr(doctor, "_version", lambda name: installed.get(name.replace("-", "_")))
        return next(iter(doctor._tensorrt()))

    assert line().state == "absent"
    assert line(tensorrt="11.4.0.1") == Check("TensorRT", "pass", "tensorrt 11.4.0.1")
    assert line(tensorrt_rtx_cu13="1.6.1.120") == Check("TensorRT", "pass", "tensorrt-rtx-cu13 1.6.1.120")
    assert line(tensorrt="10.13.0").state == "fail"
    assert "11.x is needed" in line(tensorrt="10.13.0").found


@pytest.mark.parametrize(
    ("script", "state", "found"),
    [("echo 'NVIDIA H200, 575.1, 143771 MiB'", "pass", "NVIDIA H200, 575.1, 143771 MiB"), ("exit 9", "fail", "does not answer")],
    ids=["answers", "broken"],
)
def test_the_gpu_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str, found: str) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    line = doctor._gpu()
    assert line.state == state
    assert found in line.found
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert doctor._gpu().state == "absent"


def test_an_ffmpeg_without_the_encoder_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ffmpeg"
    tool.write_text("#!/bin/sh\necho ' V....D mpeg4 MPEG-4'\n")
    tool.chmod(0o755)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(tool))
    assert "has no libx264" in doctor._ffmpeg().found
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(tmp_path / "gone"))
    assert doctor._ffmpeg().state == "fail"


def test_memory_and_disk_are_counted_in_what_a_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_eval.run.loop.free_bytes", lambda: 5_000_000_000)
    assert doctor._memory() == Check("memory", "pass", "5.0 GB free, enough for 2 LIBERO workers that draw")
    monkeypatch.setattr("vla_eval.run.loop.free_bytes", lambda: 1_000_000_000)
    assert doctor._memory().state == "fail"
    monkeypatch.chdir(tmp_path)
    assert doctor._disk().state == "pass"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written to" in doctor._disk().found
