"""What tests share: compiled LIBERO environments, since compiling one takes two to four seconds, and a GPU that host memory plays."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vla_eval.envs.libero import LiberoEnv

# A suite started in the background of a shell inherits an ignored Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # also of tests that import ONNX Runtime themselves

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads wait spinning, for cores that the other process of the suite works on

ALIVE = 3  # environments at once: four that have drawn take 4.8 GB


def pytest_configure(config: pytest.Config) -> None:
    """What needs a GPU plays where it is asked for by name: an `-m` of the command line's takes the place of one in pyproject.toml."""
    asked = config.option.markexpr
    if "gpu" not in asked:
        config.option.markexpr = f"({asked}) and not gpu" if asked else "not gpu"


@pytest.fixture(autouse=True, scope="session")
def unsynced() -> Iterator[None]:
    """Nothing of a test outlives a power cut, so nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def libero() -> Iterator[Callable[[str, int], LiberoEnv]]:
    """The environment of (suite, task), compiled once and shared: @openpi, pictures on request. Reset it before use.

    The three used last stay alive. To try another cap or another number of settling steps,
    use `monkeypatch.setattr(env, "_max_steps", 5)` instead of compiling the task again.
    """
    from vla_eval.envs.libero import LiberoEnv

    alive: OrderedDict[tuple[str, int], LiberoEnv] = OrderedDict()

    def compiled(suite: str, task: int) -> LiberoEnv:
        if (suite, task) not in alive:
            while len(alive) >= ALIVE:
                alive.popitem(last=False)[1].close()
            alive[suite, task] = LiberoEnv(suite, task, pictures="on_request")
        alive.move_to_end((suite, task))
        return alive[suite, task]

    yield compiled
    for env in alive.values():
        env.close()


@pytest.fixture(scope="session")
def emulated_card() -> ModuleType:
    """`emulated_card.py`, whose sessions tests share."""
    spec = spec_from_file_location("emulated_card", Path(__file__).with_name("emulated_card.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def emulated(
    emulated_card: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Callable[[Any], None]]:
    """A card played by host memory and ONNX Runtime (`emulated_card.py`), and a function that puts plans beside a bundle's graphs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # of compiled kernels: not the user's
    installed: tuple[Any, Callable[[Any], None]] = emulated_card.install(monkeypatch)
    return installed


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A small bundle by model, precision and batch that is wide enough for kernels of our own; float32 comes without them."""
    from vla_eval import registry
    from vla_eval.policies.gr00t import synthetic as gr00t
    from vla_eval.policies.pi05 import synthetic as pi05
    from vla_eval.policies.pi05.configuration import Tower

    home = tmp_path_factory.mktemp("wide")
    tower = Tower(128, 2, 192, 4, 1, 64)
    small = {
        "gr00t": (gr00t, replace(gr00t.TINY, hidden=128, dit_heads=8, dit_head_dim=48, dit_layers=4), {"embodiment": "libero_sim"}),
        "pi05": (
            pi05,
            replace(pi05.TINY, prefix=tower, expert=tower, vision=replace(pi05.TINY.vision, hidden=48, intermediate=64)),
            {"policy_config": "pi05_libero"},
        ),
    }  # fmt: skip

    def made(model: str, dtype: Any, batch: int = 1) -> Path:
        checkpoint, out = home / model, home / f"{model}-{dtype}-{batch}"
        module, size, options = small[model]
        if not checkpoint.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "TINY", size)
                module.synth(checkpoint)
        if not out.exists():
            geometry = checkpoint / "geometry.json"
            asked: dict[str, Any] = {**options, "dtype": dtype, "batch": batch, "kernels": dtype != "fp32", "geometry": geometry}
            registry.load_recipe(model)(checkpoint, out, **asked)
        return out

    return made
