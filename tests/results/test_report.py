"""One run as JSON and Markdown: what counts, what stands beside it, what is said."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from vla_eval.results.folder import RECORDS, open_run
from vla_eval.results.report import report


def test_errors_and_missing_episodes_stand_beside_the_rate(make_runs: ModuleType, tmp_path: Path) -> None:
    ways = ["success", "drop", "error: RuntimeError: no GL context", "success"]
    folder = make_runs.make_run(tmp_path, lambda task, trial: ways[trial], only=7)
    found = report(folder)
    assert (found.success, found.failure, found.error, found.planned) == (3, 2, 2, 12)
    assert (found.rate.k, found.rate.n) == (3, 5)
    assert [(line.rate.k, line.rate.n, line.error, line.missing) for line in found.tasks] == [(2, 3, 1, 0), (1, 2, 1, 1), (0, 0, 0, 4)]
    assert not found.complete
    assert any("5 not played and 2 ended in an error" in note for note in found.notes)
    text = found.markdown()
    assert "(INCOMPLETE)" in text
    assert "| shop@fair/2 | 0/0 | – | – | – | 0 | 4 |" in text


def test_the_json_has_counts_and_intervals_beside_every_rate(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path, lambda task, trial: "success" if trial else "idle")
    data = json.loads(json.dumps(report(folder).to_json(), allow_nan=False))
    assert data["complete"] is True
    assert (data["episodes"], data["success"], data["failure"], data["error"]) == (12, 9, 3, 0)
    for rate in (data["rate"], *(task["rate"] for task in data["tasks"])):
        assert rate["value"] == rate["k"] / rate["n"]
        assert rate["wilson"][0] <= rate["value"] <= rate["wilson"][1]
        assert rate["exact"][0] <= rate["wilson"][0]
    assert data["macro"] == {"value": 0.75, "tasks": 3}
    assert data["replan"] == 4
    assert data["protocol"]["tasks"]["shop@fair/0"]["max_steps"] == make_runs.CAP


def test_an_error_played_again_counts_once(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path, lambda task, trial: "error: boom" if (task, trial) == (0, 0) else "success")
    assert not report(folder).complete
    make_runs.play(folder, "shop@fair/0", 0, "success")
    found = report(folder)
    assert found.complete
    assert (found.rate.k, found.error) == (12, 0)


def test_latency_is_measured_from_the_recorded_answers(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path, lambda task, trial: "error: x" if trial == 3 else "success")
    found = report(folder).latency
    assert found is not None
    episodes = [folder.episode(r.task, r.trial) for r in folder.records() if r.outcome != "error"]
    totals = np.sort(np.concatenate([e.request_seconds[:, -1] for e in episodes]))
    assert found.episodes == 9
    assert set(found.stages) == {"pack", "prefill", "denoise", "unpack", "total"}
    assert found.stages["total"].n == len(totals)
    assert found.stages["total"].p50 == totals[int(np.ceil(0.5 * len(totals))) - 1]
    assert found.stages["total"].p99 == totals[int(np.ceil(0.99 * len(totals))) - 1]
    # four steps at 20 Hz last 0.2 s, an episode's last chunk as long as it was executed
    executed = np.concatenate([np.diff([*e.request_step, len(e.actions)]) for e in episodes])
    seconds = np.concatenate([e.request_seconds[:, -1] for e in episodes])
    assert found.in_time == pytest.approx(np.mean(seconds <= executed / 20))
    assert 0.9 < found.in_time < 1


def test_damaged_arrays_are_left_out_and_said(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path)
    folder.episode_path("shop@fair/1", 2).unlink()
    found = report(folder)
    assert found.rate.n == 12
    assert any("leaves out 1 episodes" in note for note in found.notes)


def test_a_half_written_last_line_is_said_and_not_counted(make_runs: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_runs.make_run(tmp_path)
    path = folder.path / RECORDS
    path.write_text(path.read_text()[:-40])
    found = report(open_run(folder.path))
    assert found.rate.n == 11
    assert not found.complete
    assert "torn" in caplog.text


def test_privileged_state_is_said(make_runs: ModuleType, tmp_path: Path) -> None:
    found = report(make_runs.make_run(tmp_path, privileged=True))
    assert found.to_json()["privileged"] is True
    assert "privileged" in found.markdown()


def test_names_cannot_break_the_table(make_runs: ModuleType, tmp_path: Path) -> None:
    text = report(make_runs.make_run(tmp_path, policy="a|b\n# <script>", run_id="x")).markdown()
    assert "a\\|b # &lt;script>" in text
    assert "<script" not in text
