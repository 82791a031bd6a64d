"""Latency of a bundle: what is counted and what is not, what the stages add up to, and PyTorch's baseline beside it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vla_eval import registry
from vla_eval.cli import main
from vla_eval.engines import bench
from vla_eval.engines.bench import measure, rival
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.policies.gr00t import policy as gr00t
from vla_eval.policies.gr00t.recipe import recipe
from vla_eval.types import BadRequest, VlaEvalError

GOLDEN = Path(__file__).parents[1] / "golden/gr00t_tiny"
Emulated = tuple[Any, Callable[[Bundle], None]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "bundle"
    recipe(GOLDEN / "checkpoint", out, embodiment="libero_sim", batch=2, geometry=GOLDEN / "geometry.json")
    return out


@pytest.fixture
def own(exported: Path, tmp_path: Path) -> Bundle:
    """A bundle that a test may put plans into."""
    return open_bundle(shutil.copytree(exported, tmp_path / "bundle"))


def test_requests_of_the_warm_up_are_answered_and_not_counted() -> None:
    answered: list[int] = []

    def answer() -> Mapping[str, float]:
        answered.append(len(answered))
        return {"pack": 1.0, "visual": 10.0 * answered[-1], "unpack": 2.0}

    found = measure(answer, requests=3, warm_up=4, on_card=False)
    assert len(answered) == 7
    assert (found.requests, found.warm_up) == (3, 4)
    assert found.seconds["visual"] == [40.0, 50.0, 60.0]
    assert set(found.seconds) == {"pack", "visual", "unpack", "whole"}


def test_on_a_card_its_stages_are_summed_and_the_rest_of_the_whole_is_the_hosts() -> None:
    def answer() -> Mapping[str, float]:
        time.sleep(0.01)
        return {"pack": 0.002, "fill": 0.001, "h2d": 0.001, "visual": 0.002, "d2h": 0.003, "unpack": 0.001}

    found = measure(answer, requests=2, warm_up=0, on_card=True).seconds
    for gpu, host, whole in zip(found["gpu"], found["host"], found["whole"], strict=True):
        assert gpu == pytest.approx(0.006)
        assert whole >= 0.01
        assert host == pytest.approx(whole - 0.006)


def test_nothing_is_measured_of_no_request() -> None:
    with pytest.raises(BadRequest, match="0 requests"):
        measure(dict, requests=0, on_card=False)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_the_command_times_every_stage_of_the_bundles_own_robot(
    own: Bundle, emulated: Emulated, backend: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated[1](own)
    load, took = registry.load_policy, list[float]()

    def timed(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        policy = load(*args, **named)
        took.append(time.perf_counter() - began)
        return policy

    monkeypatch.setattr(registry, "load_policy", timed)
    began = time.perf_counter()
    words = "pick up the bowl"
    asked = ["bench", str(own.path), "--requests", "3", "--warm-up", "2", "--instruction", words, "--backend", backend, "--json"]
    assert main(asked) == 0
    said = json.loads(capfd.readouterr().out)
    ran = {"visual", "prefill", "denoise"}
    card = {"fill", "h2d", "d2h", "gpu", "host"} if backend == "tensorrt" else set()
    assert set(said["ms"]) == {"pack", "unpack", "whole"} | ran | card
    for row in said["ms"].values():
        assert 0 <= row["p50"] <= row["p90"] <= row["p99"] <= row["max"]
    assert (said["requests"], said["warm_up"], said["batch"], said["views"], said["steps"]) == (3, 2, 2, 2, 4)
    assert said["tokens"] == gr00t.open_policy(own, backend="onnxruntime").rehearse(words).rows[0].token_ids.size
    assert took[0] <= said["load_seconds"] <= time.perf_counter() - began - said["warm_up_seconds"]
    assert (said["frontend"], said["dtype"], said["instruction"]) == ("onnx", "fp32", words)
    assert {about["backend"] for about in said["engines"].values()} == {"onnxruntime" if backend == "onnxruntime" else "tensorrt_rtx"}
    assert said["requests_per_second"] == pytest.approx(2e3 / said["ms"]["whole"]["p50"])


def test_without_an_instruction_one_of_the_registered_tasks_is_used(own: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(own.path), "--requests", "1", "--warm-up", "0", "--json"]) == 0
    known = {task.instruction for suite in registry.names(registry.TASKS) for task in registry.load_tasks(suite)}
    assert json.loads(capfd.readouterr().out)["instruction"] in known


def test_a_backend_is_said_once(own: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["bench", str(own.path), "--requests", "1", "--warm-up", "0", "--option", "backend=onnxruntime"]
    assert main(words) == 0
    assert main([*words, "--backend", "tensorrt"]) == 2
    assert "disagree; say it once" in capfd.readouterr().err


def test_a_baseline_on_a_gpu_is_not_held_against_a_cpu(own: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(own.path), "--against", "torch", "--requests", "1"]) == 2
    assert "needs" in capfd.readouterr().err


def test_a_bundle_of_other_sizes_has_no_baseline(own: Bundle, emulated: Emulated, capfd: pytest.CaptureFixture[str]) -> None:
    emulated[1](own)
    assert main(["bench", str(own.path), "--against", "torch", "--requests", "1", "--backend", "tensorrt"]) == 2
    assert "other sizes than the released model" in capfd.readouterr().err


SCRIPT = """
import json, sys
row = lambda part, ms: {"arm": "lean-graph", "part": part, "batch": 2, "ms": ms, "p99": ms + 1}
rows = [row("vision", 2.0), row("e2e", 8.0), {**row("e2e", 99.0), "arm": "lean-eager"}, *EXTRA]
print("a table"); print("JSON " + json.dumps({"torch": "9.9", "gpu": "Stand-in", "rows": rows, "argv": sys.argv[1:]}))
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A folder with a baseline that prints what it is told, in an environment whose PyTorch sees a GPU."""

    def made(extra: str = "[]") -> Path:
        (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: True)\n")
        (tmp_path / "torch_baseline_gr00t.py").write_text(SCRIPT.replace("EXTRA", extra))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return tmp_path

    return made


def test_the_baseline_is_run_with_the_bundles_sizes_and_its_graph_alone_is_read(scripts: Callable[..., Path]) -> None:
    found = rival("gr00t", {"dtype": "fp16", "batch": 2}, scripts=scripts())
    assert found["parts"] == {"vision": {"p50": 2.0, "p99": 3.0}, "e2e": {"p50": 8.0, "p99": 9.0}}
    assert found["command"][1:] == ["--arms", "lean-graph", "--dtype", "fp16", "--batch", "2"]
    assert (found["torch"], found["gpu"]) == ("9.9", "Stand-in")


def test_the_command_says_how_many_times_faster_the_bundle_is(
    own: Bundle, emulated: Emulated, scripts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    emulated[1](own)
    folder = scripts()
    monkeypatch.setattr(bench, "rival", lambda model, arguments: rival(model, arguments, scripts=folder))
    monkeypatch.setattr(gr00t, "asdict", lambda _: own.options["geometry"])  # as if the tiny network were the released one
    assert main(["bench", str(own.path), "--against", "torch", "--requests", "2", "--warm-up", "1", "--backend", "tensorrt", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["against"]["times_faster"] == pytest.approx(8.0 / said["ms"]["gpu"]["p50"])
    words = said["against"]["command"][1:]
    assert words == ["--arms", "lean-graph", "--dtype", "fp32", "--batch", "2", "--steps", "4"]
    script = (bench.RIVALS / "torch_baseline_gr00t.py").read_text()
    assert all(f'"{word}"' in script for word in words if word.startswith("--"))


def test_a_baseline_that_fails_is_a_sentence_with_its_reason(scripts: Callable[..., Path]) -> None:
    folder = scripts('[{"arm": "lean-graph", "part": "e2e", "error": "OutOfMemoryError: 3 GB"}]')
    with pytest.raises(VlaEvalError, match=r"e2e: OutOfMemoryError: 3 GB; run it by hand"):
        rival("gr00t", {}, scripts=folder)
    (folder / "torch_baseline_gr00t.py").write_text("raise SystemExit('no such card')")
    with pytest.raises(VlaEvalError, match="no such card"):
        rival("gr00t", {}, scripts=folder)


def test_without_scripts_or_torch_or_a_gpu_the_baseline_is_refused(
    scripts: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadRequest, match=r"torch_baseline_gr00t\.py is in a checkout's benchmarks/rivals"):
        rival("gr00t", {}, scripts=tmp_path / "elsewhere")
    folder = scripts()
    (folder / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    with pytest.raises(BadRequest, match="finds no CUDA"):
        rival("gr00t", {}, scripts=folder)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="PyTorch is not installed"):
        rival("gr00t", {}, scripts=folder)


def test_the_checkout_has_the_baselines_where_they_are_looked_for() -> None:
    assert sorted(script.name for script in bench.RIVALS.glob("torch_baseline_*.py")) == [
        "torch_baseline_gr00t.py", "torch_baseline_pi05.py",
    ]  # fmt: skip
