"""The page on datasets lists the rules that there are."""

from __future__ import annotations

import re
from pathlib import Path

from vla_eval.results.lerobot_rules import ERRORS, WARNINGS

PAGE = Path(__file__).parents[3] / "docs/datasets.md"


def test_the_page_lists_every_rule_with_its_meaning() -> None:
    listed = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {**ERRORS, **WARNINGS}
