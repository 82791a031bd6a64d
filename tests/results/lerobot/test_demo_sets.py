"""The metadata of NVIDIA's demo sets as published: every known fault is found, none is invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_eval.results.lerobot_check import check
from vla_eval.results.lerobot_meta import open_dataset
from vla_eval.results.lerobot_stats import fingerprint

DEMOS = Path(__file__).parents[2] / "golden/gr00t_demos"
FINDINGS = json.loads((DEMOS / "findings.json").read_text())
SETS = sorted(path.name for path in DEMOS.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", SETS)
def test_a_demo_set_has_the_faults_that_are_known_of_it(name: str) -> None:
    found = [finding for finding in check(DEMOS / name, videos=False) if finding.file.startswith("meta/")]
    assert len(found) == len(FINDINGS[name]), [str(finding) for finding in found]
    for rule, text in FINDINGS[name]:
        assert any(finding.rule == rule and finding.text.startswith(text) for finding in found), (rule, text)


@pytest.mark.parametrize("name", ["libero_demo", "droid_sample"])
def test_the_fingerprints_they_carry_are_the_ones_we_compute(name: str) -> None:
    carried = json.loads((DEMOS / name / "meta/stats.json").read_text())["__fingerprints__"]
    features = open_dataset(DEMOS / name).features
    assert {feature: fingerprint(feature, features[feature]) for feature in carried} == carried
    assert len(carried) > 1
