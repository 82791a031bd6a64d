"""Tables of the docs that a benchmark's JSON fills: each stands between two comments of its page, `<!-- name -->` and `<!-- end -->`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Put each table in its place. Raises ValueError, and writes nothing, if the page has not just one of that name."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin = f"<!-- {name} -->\n"
        before, *after = text.split(begin)
        if len(after) != 1 or "<!-- end -->" not in after[0]:
            raise ValueError(f"{page}: {len(after)} places for the table {name!r}; write '<!-- {name} -->' and '<!-- end -->' once")
        text = f"{before}{begin}{table}{after[0][after[0].index('<!-- end -->') :]}"
    page.write_text(text, encoding="utf-8")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A Markdown table; `align` has a letter for each column, l or r."""
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(heads), "l")]
    lines = [heads, *([str(value) for value in row] for row in rows)]
    first, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, f"|{'|'.join(rules)}|", *rest]) + "\n"
