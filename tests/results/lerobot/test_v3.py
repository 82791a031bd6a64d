"""The v3.0 export: the same rows and pictures, many episodes a file. (LeRobot's own reader is run on it by tests/reference.)"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_eval.results import lerobot_v3
from vla_eval.results.folder import RunFolder
from vla_eval.results.lerobot import write
from vla_eval.results.lerobot_video import decode
from vla_eval.types import BadRequest

MakeRun = Callable[..., RunFolder]
CAMERA = "observation.images.image"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, draw_views: Any) -> tuple[Path, Path]:
    """One run in the layout of v2.1 and in that of v3.0, to read."""
    folder = tmp_path_factory.mktemp("both")
    run = make_run(folder)
    write([run], folder / "v2", size=32, studio=draw_views)
    write([run], folder / "v3", size=32, studio=draw_views, version="v3.0")
    return folder / "v2", folder / "v3"


def test_rows_follow_one_another_in_one_file(both: tuple[Path, Path]) -> None:
    v2, v3 = both
    rows = pq.read_table(v3 / "data/chunk-000/file-000.parquet")
    assert rows.equals(pa.concat_tables(pq.read_table(file) for file in sorted(v2.glob("data/*/*.parquet"))))
    episodes = pq.read_table(v3 / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(one["dataset_from_index"], one["dataset_to_index"], one["length"]) for one in episodes] == [
        (0, 31, 31),
        (31, 51, 20),
        (51, 74, 23),
    ]
    assert episodes[2]["tasks"] == ["öffne die Schublade"]
    assert [path.name for path in v3.iterdir() if path.name.startswith(("v2", "."))] == []


def test_each_episode_s_pictures_lie_where_its_line_says(both: tuple[Path, Path]) -> None:
    _, v3 = both
    film = decode(v3 / "videos" / CAMERA / "chunk-000/file-000.mp4")
    assert (film.frames, film.fps) == (74, 20.0)
    episodes = pq.read_table(v3 / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(one[f"videos/{CAMERA}/from_timestamp"], one[f"videos/{CAMERA}/to_timestamp"]) for one in episodes] == [
        (0, 1.55),
        (1.55, 2.55),
        (2.55, 3.7),
    ]


def test_a_full_file_is_followed_by_the_next(tmp_path: Path, make_run: MakeRun, draw_views: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("DATA_FILE_MB", "VIDEO_FILE_MB"):
        monkeypatch.setattr(lerobot_v3, limit, 0)
    monkeypatch.setattr(lerobot_v3, "FILES_A_FOLDER", 2)
    v3 = tmp_path / "v3"
    write([make_run(tmp_path)], v3, size=32, studio=draw_views, version="v3.0")
    episodes = pq.read_table(v3 / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    for what in ("data", f"videos/{CAMERA}"):
        assert [(one[f"{what}/chunk_index"], one[f"{what}/file_index"]) for one in episodes] == [(0, 0), (0, 1), (1, 0)]
    assert [one[f"videos/{CAMERA}/from_timestamp"] for one in episodes] == [0, 0, 0]
    assert pq.read_table(v3 / "data/chunk-001/file-000.parquet").num_rows == 23
    assert decode(v3 / "videos" / CAMERA / "chunk-001/file-000.mp4").frames == 23


def test_tasks_are_looked_up_by_their_sentence(tmp_path: Path, make_run: MakeRun) -> None:
    write([make_run(tmp_path)], tmp_path / "v3", version="v3.0")
    tasks = pd.read_parquet(tmp_path / "v3/meta/tasks.parquet")
    assert tasks.loc["öffne die Schublade"].task_index == 1
    assert tasks.iloc[0].name == "put the bowl on the plate"


def test_info_and_statistics_are_those_of_v3(both: tuple[Path, Path]) -> None:
    v2, v3 = both
    info = json.loads((v3 / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert info["features"]["action"]["fps"] == 20
    assert not {"total_chunks", "total_videos"} & info.keys()
    stats, before = (json.loads((root / "meta/stats.json").read_text()) for root in (v3, v2))
    assert stats["action"] == before["action"] | {"count": [74]}
    pictures = stats[CAMERA]
    assert {field: np.shape(values) for field, values in pictures.items()} == {
        **dict.fromkeys(("min", "max", "mean", "std"), (3, 1, 1)), "count": (1,),
    }  # fmt: skip
    assert pictures["count"] == [4 + 2 + 3]  # every tenth of 31, 20 and 23
    # A quarter of each picture is 200, half of it 20 … 148 by the step: key frames are steps 0, 10, 20, 30 of their episodes.
    grey = [20 + 8 * (step % 16) for step in (0, 10, 20, 30, 0, 10, 0, 10, 20)]
    assert pictures["mean"][0][0][0] == pytest.approx((200 / 4 + np.mean(grey) / 2) / 255, abs=0.01)  # H.264 is lossy: a grey level or two


def test_a_v3_dataset_is_not_added_to(tmp_path: Path, make_run: MakeRun) -> None:
    write([make_run(tmp_path)], tmp_path / "v3", version="v3.0")
    second = make_run(tmp_path, run_id="b")
    with pytest.raises(BadRequest, match="added to a v2"):
        write([second], tmp_path / "v3", version="v3.0", append=True)
    with pytest.raises(BadRequest, match=r"this is LeRobot v3\.0"):
        write([second], tmp_path / "v3", append=True)
