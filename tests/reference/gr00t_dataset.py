"""NVIDIA's own loader reads what we write, and our check says of its demo sets what is known of them.

Not collected by itself, since it needs a checkout of Isaac-GR00T (any commit with gr00t/data/dataset/lerobot_episode_loader.py) and pandas:

    ISAAC_GROOT=~/Isaac-GR00T pytest tests/reference/gr00t_dataset.py

Stubbed are only the pieces that would pull in a GPU stack: the video decoder (ours decodes instead), the robot configurations and the
helpers of relative statistics.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from vla_eval.policies.baseline import random
from vla_eval.registry import load_tasks
from vla_eval.results.folder import Episode, RunFolder, open_run
from vla_eval.results.lerobot import Draw, write
from vla_eval.results.lerobot_check import check
from vla_eval.run import render
from vla_eval.run.loop import start

GROUPS = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
SIZE = 64
# What is wrong with the metadata of the sets in Isaac-GR00T/demo_data; their rows and videos are Git LFS pointers until fetched.
DEMOS: dict[str, list[tuple[str, str]]] = json.loads((Path(__file__).parents[1] / "golden/gr00t_demos/findings.json").read_text())


@pytest.fixture(scope="session")
def checkout() -> Path:
    path = Path(os.environ.get("ISAAC_GROOT", "")).expanduser()
    if not (path / "gr00t/data/dataset/lerobot_episode_loader.py").is_file():
        pytest.fail("set ISAAC_GROOT to a checkout of Isaac-GR00T")
    return path


@pytest.fixture(scope="session")
def gr00t(checkout: Path) -> Iterator[Any]:
    """Its modules `loader` and `stats`, run as they are."""

    def stub(name: str, **members: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module

    def frames(path: str, indices: np.ndarray, **options: Any) -> np.ndarray:
        command = [get_ffmpeg_exe(), "-loglevel", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
        shown = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8).reshape(-1, SIZE, SIZE, 3)
        chosen: np.ndarray = shown[indices]
        return chosen

    sys.path.insert(0, str(checkout))
    stub("gr00t.utils.video_utils", get_frames_by_indices=frames)
    stub("gr00t.configs.data.embodiment_configs", MODALITY_CONFIGS={})
    stub("gr00t.data.state_action.action_chunking", EndEffectorActionChunk=None, JointActionChunk=None)
    stub("gr00t.data.state_action.pose", EndEffectorPose=None, JointPose=None)
    stub("gr00t.data.utils", to_json_serializable=None)
    stub("tqdm", tqdm=lambda things, **options: things)
    loader = importlib.import_module("gr00t.data.dataset.lerobot_episode_loader")
    yield type("Gr00t", (), {"loader": loader, "stats": importlib.import_module("gr00t.data.stats"), "types": loader})
    sys.path.remove(str(checkout))


class _Studio:
    """Draws a run's episodes with its own environment."""

    def __init__(self, folder: RunFolder, task: str, size: int) -> None:
        self._scene = render.scene(folder, task, size)

    def __enter__(self) -> Draw:
        env = self._scene.__enter__()

        def draw(episode: Episode) -> Iterator[Any]:
            return render.frames(env, episode)

        return draw

    def __exit__(self, *raised: Any) -> None:
        self._scene.__exit__(*raised)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunFolder]:
    """Six episodes of the toy, as a dataset under the default convention."""
    out = tmp_path_factory.mktemp("reference")
    with start(random(horizon=4), load_tasks("toy@v1")[:3], trials=2, seed=3, workers=0, out=out / "runs") as run:
        list(run)
        assert run.folder is not None
    folder = open_run(run.folder.path)
    write([folder], out / "data", size=SIZE, studio=_Studio)
    return out / "data", folder


def opened(gr00t: Any, root: Path) -> Any:
    config = gr00t.loader.ModalityConfig
    return gr00t.loader.LeRobotEpisodeLoader(
        root,
        {
            "video": config(delta_indices=[0], modality_keys=["image", "wrist_image"]),
            "state": config(delta_indices=[0], modality_keys=GROUPS),
            "action": config(delta_indices=list(range(16)), modality_keys=GROUPS),
            "language": config(delta_indices=[0], modality_keys=["annotation.human.action.task_description"]),
        },
    )


def test_the_loader_gives_every_episode_back(gr00t: Any, written: tuple[Path, RunFolder]) -> None:
    root, folder = written
    loader = opened(gr00t, root)
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    assert len(loader) == len(lines) == 6
    for index, line in enumerate(lines):
        rows, episode = loader[index], folder.episode(line["source"]["task"], line["source"]["trial"])
        assert len(rows) == line["length"] == len(episode.actions)
        state = np.concatenate([np.stack(rows[f"state.{name}"]) for name in GROUPS], axis=1)
        action = np.concatenate([np.stack(rows[f"action.{name}"]) for name in GROUPS], axis=1)
        assert state.dtype == action.dtype == np.float32
        assert np.array_equal(state, episode.proprio[:-1])
        assert np.array_equal(action[:, :6], episode.actions[:, :6])
        assert np.allclose(action[:, 6], (1 - episode.actions[:, 6]) / 2, atol=1e-7)
        assert set(rows["language.annotation.human.action.task_description"]) == set(line["tasks"])
        assert {rows[f"video.{name}"].iloc[-1].shape for name in ("image", "wrist_image")} == {(SIZE, SIZE, 3)}


def test_its_statistics_are_ours_and_pass_its_own_validity_check(gr00t: Any, written: tuple[Path, RunFolder]) -> None:
    root, _ = written
    names = ["observation.state", "action", "timestamp"]
    assert gr00t.stats.check_stats_validity(root, names)
    theirs = gr00t.stats.calculate_dataset_statistics(sorted(root.glob("data/*/*.parquet")), names)
    ours = json.loads((root / "meta/stats.json").read_text())
    for name in names:
        for field, values in theirs[name].items():
            # They add about 240 rows in float32: 240 units of 2⁻²⁴, of numbers up to 3.2.
            assert np.allclose(ours[name][field], values, rtol=0, atol=240 * 2.0**-24 * 3.2), (name, field)
    bounds = opened(gr00t, root).get_dataset_statistics()
    assert {len(bounds["state"]["gripper"][field]) for field in ("mean", "std", "min", "max", "q01", "q99")} == {2}


@pytest.mark.parametrize("case", ["blank_last_line", "byte_order_mark", "pretty_printed"])
def test_what_stops_the_loader_is_an_error_of_ours(case: str, gr00t: Any, written: tuple[Path, RunFolder], tmp_path: Path) -> None:
    root = Path(shutil.copytree(written[0], tmp_path / "copy"))
    shutil.copy(Path(__file__).parents[1] / f"cases/datasets/tasks/{case}.jsonl", root / "meta/tasks.jsonl")
    assert any(finding.severity == "error" and finding.file == "meta/tasks.jsonl" for finding in check(root, videos=False))
    with pytest.raises(ValueError, match=r"Expecting|BOM"):
        opened(gr00t, root)


@pytest.mark.parametrize("name", DEMOS)
def test_the_demo_sets_have_the_faults_that_are_known_of_them(name: str, checkout: Path) -> None:
    root = checkout / "demo_data" / name
    if not (root / "meta/info.json").is_file():
        pytest.skip(f"this checkout has no demo_data/{name}")
    found = [finding for finding in check(root, videos=False) if finding.file.startswith("meta/") and finding.rule != "constant-dimension"]
    assert len(found) == len(DEMOS[name]), [str(finding) for finding in found]
    for rule, text in DEMOS[name]:
        assert any(finding.rule == rule and finding.text.startswith(text) for finding in found), (rule, text)


def test_an_annotation_of_no_column_stops_the_loader_only_if_it_is_asked_for(
    gr00t: Any, written: tuple[Path, RunFolder], tmp_path: Path
) -> None:
    """Two of the demo sets have one, so it is a warning."""
    root = Path(shutil.copytree(written[0], tmp_path / "copy"))
    modality = json.loads((root / "meta/modality.json").read_text())
    modality["annotation"]["human.validity"] = {}
    (root / "meta/modality.json").write_text(json.dumps(modality))
    assert [(finding.rule, finding.severity) for finding in check(root, videos=False) if finding.rule != "constant-dimension"] == [
        ("annotation-column", "warning")
    ]
    assert len(opened(gr00t, root)[0]) > 0


def test_an_instruction_under_another_name_stops_the_loader(gr00t: Any, written: tuple[Path, RunFolder], tmp_path: Path) -> None:
    """What `policy-language` says of such a set."""
    root = Path(shutil.copytree(written[0], tmp_path / "copy"))
    modality = json.loads((root / "meta/modality.json").read_text())
    modality["annotation"] = {"human.task": {"original_key": "task_index"}}
    (root / "meta/modality.json").write_text(json.dumps(modality))
    with pytest.raises(AssertionError, match="not found in language modality"):
        opened(gr00t, root)[0]
