"""`vla-eval dataset …` from the outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_eval import cli
from vla_eval.results.folder import RunFolder

Command = Callable[..., tuple[int, str, str]]
MakeRun = Callable[..., RunFolder]


@pytest.fixture
def vla_eval(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command: (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        return code, *capfd.readouterr()

    return run


def test_a_run_becomes_a_dataset_that_passes_its_check(vla_eval: Command, make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run(tmp_path), tmp_path / "out"
    code, said, _ = vla_eval("dataset", "write", run.path, "--out", out, "--no-video")
    assert (code, said) == (0, f"{out}: 3 episodes, 74 rows written; 1 left out (error); it holds 3 and 74 now\n")
    assert vla_eval("dataset", "check", out)[:2] == (0, f"{out}: nothing is wrong\n")
    code, said, _ = vla_eval("dataset", "write", make_run(tmp_path, run_id="b").path, "--out", out, "--no-video", "--append", "--json")
    assert code == 0
    assert json.loads(said)["total_episodes"] == 6


def test_a_finding_is_one_line_whatever_the_width_and_errors_exit_with_1(vla_eval: Command, dataset: Path) -> None:
    (dataset / "meta/modality.json").write_text(
        json.dumps({"state": {"a" * 200: {"start": 0, "end": 9}}, "action": {"all": {"start": 0, "end": 7}}})
    )
    code, said, _ = vla_eval("dataset", "check", dataset, "--no-video")
    lines = said.splitlines()
    assert code == 1
    assert len(lines) == 2
    assert lines[0].startswith(f"error: meta/modality.json: state.{'a' * 200} is 0:9")
    assert lines[1] == f"{dataset}: 1 errors, 0 warnings"


def test_strict_counts_warnings_and_json_holds_every_finding(vla_eval: Command, dataset: Path) -> None:
    info = json.loads((dataset / "meta/info.json").read_text())
    (dataset / "meta/info.json").write_text(json.dumps(info | {"splits": {"train": "0:50"}}))
    assert vla_eval("dataset", "check", dataset, "--no-video")[0] == 0
    code, said, _ = vla_eval("dataset", "check", dataset, "--no-video", "--strict", "--json")
    found = json.loads(said)
    assert (code, found["exit"], found["errors"], found["warnings"]) == (1, 1, 0, 1)
    assert found["findings"] == [
        {
            "severity": "warning",
            "rule": "info-splits",
            "file": "meta/info.json",
            "row": None,
            "text": "split 'train' is '0:50'; there are 3 episodes, so at most '0:3'",
        }
    ]


def test_statistics_are_written_anew(vla_eval: Command, dataset: Path) -> None:
    (dataset / "meta/stats.json").unlink()
    assert vla_eval("dataset", "check", dataset, "--no-video")[0] == 1
    assert vla_eval("dataset", "stats", dataset)[:2] == (0, f"{dataset}/meta/stats.json: observation.state, action, timestamp\n")
    assert vla_eval("dataset", "check", dataset, "--no-video")[0] == 0


def test_a_bundle_s_bounds_are_compared(vla_eval: Command, dataset: Path, tmp_path: Path) -> None:
    """Degrees where the policy has radians; everything else is as wide as the policy knows it."""
    stats = json.loads((dataset / "meta/stats.json").read_text())
    sides: dict[str, Any] = {}
    for side, column in (("state", "observation.state"), ("action", "action")):
        names = json.loads((dataset / "meta/modality.json").read_text())[side]
        sides[side] = {
            "groups": [
                {
                    "key": name,
                    "dim": place["end"] - place["start"],
                    "encoding": "bounds",
                    "low": stats[column]["q01"][place["start"] : place["end"]],
                    "high": stats[column]["q99"][place["start"] : place["end"]],
                }
                for name, place in names.items()
            ]
        }
    policy: dict[str, Any] = {"model_family": "gr00t_n1d7", "cameras": ["image", "wrist_image"], "trained_for": ["pick"], **sides}
    policy["action"]["horizon"] = 21
    (tmp_path / "bundle/action").mkdir(parents=True)
    file = tmp_path / "bundle/action/policy.json"
    file.write_text(json.dumps(policy))
    code, said, _ = vla_eval("dataset", "check", dataset, "--no-video", "--against", tmp_path / "bundle")
    assert code == 0
    assert "episode 1 has 20 rows, fewer than the 21 actions of a chunk" in said.splitlines()[0]
    yaw = policy["state"]["groups"][5]
    yaw["low"], yaw["high"] = [low / 57.29578 for low in yaw["low"]], [high / 57.29578 for high in yaw["high"]]
    file.write_text(json.dumps(policy))
    code, said, _ = vla_eval("dataset", "check", dataset, "--no-video", "--against", tmp_path / "bundle")
    assert code == 1
    (line,) = [line for line in said.splitlines() if "policy-scale" in line]
    assert "state.yaw[0]" in line
    assert "degrees against radians?" in line


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("dataset check nowhere", "nowhere: no such folder"),
        ("dataset stats nowhere", "nowhere: no such folder"),
        ("dataset write nowhere --out there", "nowhere: no run folder"),
        ("dataset replay {dataset} --task toyy", "unknown suite 'toyy'"),
        ("dataset replay {dataset} --task toy --episodes 3-1", "neither a number nor a range"),
        ("dataset replay {dataset} --task toy --episodes 9", "has no episode 9"),
        ("dataset replay {dataset} --task toy", "episode 0 is of 'pick@v1/0', which is none of toy@v1's tasks"),
        ("dataset check {dataset} --against {dataset}", "action/policy.json is not there; --against wants"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    vla_eval: Command, line: str, sentence: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = vla_eval(*line.format(dataset=dataset).split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("vla-eval: ")
    assert sentence in err
    assert not (tmp_path / "there").exists()
