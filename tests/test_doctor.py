"""The doctor's lines: what fails, and the command that mends it."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vla_eval import cli, doctor, registry
from vla_eval.doctor import Certified
from vla_eval.types import BadRequest, Check, Measured, Probe, Task


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
    monkeypatch.setattr(doctor, "packages_distributions", lambda: {"vla_eval": ["vla-eval-trt", "vla-eval"]})
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


def broken() -> Measured:
    raise ZeroDivisionError("no context")


PROBES = [
    Probe("light", "bright", lambda: Measured(True, "bright", "never said")),
    Probe("crash", "anything", broken, "a driver"),
    Probe("taps", "shut", lambda: Measured(False, "open", "a washer")),
]


def kitchen(monkeypatch: pytest.MonkeyPatch, **module: Any) -> None:
    """Two suites: `kitchen`, whose environments' module has `module`'s attributes, and `cellar`, whose has none."""
    for name, attributes in (("kitchen", module), ("cellar", {})):
        found = ModuleType(f"{name}_envs")
        vars(found).update(attributes)
        monkeypatch.setitem(sys.modules, f"{name}_envs", found)
    monkeypatch.setattr(registry, "names", lambda group: ["cellar", "kitchen"])
    monkeypatch.setattr(registry, "_all_tasks", lambda suite: [Task(f"{suite}@v1/0", f"{suite}_envs:me/X-v0", "cook", max_steps=3)])


def test_a_crash_is_its_own_lines_error_and_the_others_go_on() -> None:
    assert [doctor.measured(probe) for probe in PROBES] == [
        Certified("light", "pass", "bright", "bright"),
        Certified("crash", "error", "ZeroDivisionError: no context", "anything", "a driver"),
        Certified("taps", "fail", "open", "shut", "a washer"),
    ]


def test_environments_of_any_package_certify_what_is_asked_for_or_what_they_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def certify(suites: list[str], play: Any) -> Any:
        asked.append(list(suites))
        return iter(PROBES)

    kitchen(monkeypatch, certify=certify)
    assert list(doctor.probes(["kitchen"])) == PROBES
    assert list(doctor.probes()) == PROBES  # the cellar has nothing to say
    assert asked == [["kitchen"], []]
    with pytest.raises(BadRequest, match="--suite cellar: cellar_envs cannot certify"):
        doctor.probes(["kitchen", "cellar"])
    with pytest.raises(BadRequest, match="write kitchen"):
        doctor.probes(["kitchen@v1"])
    kitchen(monkeypatch)
    with pytest.raises(BadRequest, match="nothing installed here"):
        doctor.probes()


@pytest.mark.parametrize(("wanted", "code"), [([0], 0), ([0, 1], 1), ([0, 2], 1)], ids=["pass", "error", "fail"])
def test_a_certificate_is_printed_and_is_json_and_fails_by_exit_code_1(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wanted: list[int], code: int
) -> None:
    lines = [PROBES[k] for k in wanted]
    kitchen(monkeypatch, certify=lambda suites, play: iter(lines))
    monkeypatch.setattr(doctor, "checks", list)
    assert cli.main(["doctor", "--certify", "--json"]) == code
    told = json.loads(capfd.readouterr().out)
    assert told == {"checks": [], "certificate": [doctor.measured(probe)._asdict() for probe in lines], "exit": code}
    assert cli.main(["doctor", "--certify", "--suite", "kitchen"]) == code
    out = capfd.readouterr().out
    for probe in lines:
        for text in doctor.measured(probe)[2:]:
            assert text in out
    assert ("likely cause" in out) == bool(code)


def test_what_cannot_be_certified_is_refused_before_anything_is_measured(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "checks", lambda: pytest.fail("measured"))
    for words, sentence in (
        (["--suite", "libero_10"], "--suite goes with --certify"),
        (["--certify", "--suite", "libero_goals"], "did you mean 'libero_goal'"),
        (["--certify", "--suite", "libero_10@gr00t"], "write libero_10"),
        (["--certify", "--suite", "toy"], "--suite toy: nothing is recorded"),
    ):
        assert cli.main(["doctor", *words]) == 2
        assert sentence in capfd.readouterr().err


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
