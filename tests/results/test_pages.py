"""The pages, clicked through in a real browser: Debian's Chromium, opened from disk, with no network."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from vla_eval.results.compare import compare
from vla_eval.results.folder import RunFolder
from vla_eval.results.leaderboard import leaderboard
from vla_eval.results.pages import contact_sheet, leaderboard_page, review, review_pair
from vla_eval.types import BadRequest

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NASTY = "error: RuntimeError: </script><img src=x onerror=\"document.title='broken into'\"> $\\alpha$ & more"

browser_needed = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt install chromium")


def film(path: Path, frames: int, size: tuple[int, int] = (96, 64)) -> None:
    """A small film that gets brighter."""
    writer = imageio_ffmpeg.write_frames(str(path), size, fps=20, macro_block_size=2, ffmpeg_log_level="fatal")
    writer.send(None)
    for number in range(frames):
        writer.send(np.full((size[1], size[0], 3), 255 * number // frames, np.uint8))
    writer.close()


@pytest.fixture(scope="session")
def runs(make_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """A clerk who fails in every way, and a baker who fails in one; with films of the first three trials."""
    out = tmp_path_factory.mktemp("runs")
    ways = [*make_runs.TAUGHT, NASTY]
    clerk = make_runs.make_run(out, lambda task, trial: ways[(task + trial) % len(ways)], trials=9, run_id="clerk", policy="<b>clerk</b>")
    baker = make_runs.make_run(out, lambda task, trial: "drop" if trial == 3 else "success", trials=9, run_id="baker", policy="baker")
    original = out / "film.mp4"
    film(original, 60)
    for folder in (clerk, baker):
        for record in folder.records():
            if record.trial < 3 and record.outcome != "error":
                shutil.copy(original, folder.episode_path(record.task, record.trial, ".mp4"))
    return clerk, baker


@pytest.fixture(scope="session")
def pages(runs: tuple[RunFolder, RunFolder]) -> dict[str, Path]:
    clerk, baker = runs
    return {
        "review": review(clerk, clerk.path / "review"),
        "pair": review_pair(compare(clerk, baker), clerk, baker, baker.path / "versus-clerk"),
        "leaderboard": leaderboard_page(leaderboard([clerk.path, baker.path]), clerk.path.parent / "leaderboard.html"),
    }


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        profile = tmp_path_factory.mktemp("profile")
        context = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, headless=True, args=FLAGS, offline=True
        )
        yield context
        context.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A tab at 1280 × 900 in which every console error and every missing file fails the test."""
    page, wrong = chromium.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # a film that is left before it has been read is cancelled, which is nobody's mistake
    page.on(
        "requestfailed", lambda request: wrong.append(f"{request.url} {request.failure}") if request.failure != "net::ERR_ABORTED" else None
    )
    page.set_viewport_size({"width": 1280, "height": 900})
    yield page
    page.close()
    assert wrong == []


def visible(page: Any) -> int:
    return int(page.locator(".card:visible").count())


@browser_needed
def test_a_filter_leaves_its_episodes_and_says_how_many(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["review"].as_uri())
    assert visible(page) == 27
    page.select_option("[data-filter=outcome]", "success")
    assert page.locator("#count").inner_text() == "3 of 27 shown"
    assert visible(page) == 3
    page.select_option("[data-filter=task]", "shop@fair/1")
    assert page.locator("#count").inner_text() == "1 of 27 shown"
    page.select_option("[data-filter=outcome]", "")
    page.select_option("[data-filter=bin]", "grasped and lost")
    assert page.locator(".card:visible strong").all_text_contents() == ["shop@fair/1, trial 3"]


@browser_needed
def test_a_film_plays_and_its_time_line_seeks(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["review"].as_uri())
    page.locator(".card").nth(2).click()
    video = page.locator("dialog video")
    page.wait_for_function("document.querySelector('dialog video').currentTime > 0.2")
    video.evaluate("v => v.pause()")
    line = page.locator("dialog .line").first
    box = line.bounding_box()
    line.click(position={"x": 0.75 * box["width"], "y": 5})
    page.wait_for_function("Math.abs(document.querySelector('dialog video').currentTime - 0.75 * 3) < 0.1")  # sixty frames at 20
    page.wait_for_function("parseFloat(document.querySelector('dialog .line b').style.left) > 70")


@browser_needed
def test_keys_go_to_the_next_and_the_previous_failure(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["review"].as_uri())
    title = page.locator("#one-title")
    page.keyboard.press("n")
    assert title.inner_text() == "shop@fair/0, trial 1"  # trial 0 succeeded
    page.keyboard.press("n")
    assert title.inner_text() == "shop@fair/0, trial 2"
    page.keyboard.press("p")
    assert title.inner_text() == "shop@fair/0, trial 1"
    page.keyboard.press("ArrowLeft")
    assert title.inner_text() == "shop@fair/0, trial 0"
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    page.select_option("[data-filter=task]", "shop@fair/2")
    page.locator("body").click(position={"x": 2, "y": 2})
    page.keyboard.press("n")
    assert title.inner_text() == "shop@fair/2, trial 0"  # only what the filter shows


@browser_needed
def test_a_disagreement_shows_both_films_at_one_time(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["pair"].as_uri())
    page.locator(".card").first.click()
    assert page.locator("dialog video").count() == 2
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.readyState >= 2)")
    page.locator("dialog video").first.evaluate("v => { v.pause(); v.currentTime = 1.5; }")
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.paused && Math.abs(v.currentTime - 1.5) < 0.05)")
    page.locator("dialog video").nth(1).evaluate("v => v.play()")
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.currentTime > 1.7)")
    times = page.evaluate("[...document.querySelectorAll('dialog video')].map(v => v.currentTime)")
    assert abs(times[0] - times[1]) < 0.25  # five frames: each film is decoded by itself


@browser_needed
def test_both_of_a_pair_have_one_axis_of_time(page: Any, pages: dict[str, Path], runs: tuple[RunFolder, RunFolder]) -> None:
    page.goto(pages["pair"].as_uri())
    title = page.locator(".card strong").first.inner_text()
    task, trial = title.split(", trial ")
    states = [next(r.steps + 1 for r in run.records() if (r.task, r.trial) == (task, int(trial))) for run in runs]
    assert states[0] != states[1]
    page.locator(".card").first.click()
    ends = [
        page.locator(f".views > div:nth-child({view}) .line").first.evaluate(
            "l => { const rest = l.querySelector('u'); return rest ? parseFloat(rest.style.left) : 100; }"
        )
        for view in (1, 2)
    ]
    assert ends == pytest.approx([100 * states[0] / max(states), 100 * states[1] / max(states)])
    shorter = 1 + states.index(min(states))
    line = page.locator(f".views > div:nth-child({shorter}) .line").first
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.readyState >= 2)")
    page.locator("dialog video").first.evaluate("v => v.pause()")
    box = line.bounding_box()
    line.click(position={"x": box["width"] * min(ends) / 200, "y": 5})  # the middle of its own part: the middle of its film
    page.wait_for_function(f"Math.abs(document.querySelectorAll('dialog video')[{shorter - 1}].currentTime - 1.5) < 0.1")


@browser_needed
def test_films_that_have_ended_start_again_together(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["pair"].as_uri())
    page.locator(".card").first.click()
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.readyState >= 2)")
    page.locator("dialog video").first.evaluate("v => { v.currentTime = 2.8; v.play(); }")
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.ended)")
    page.locator("dialog video").first.evaluate("v => v.play()")
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => !v.ended && v.currentTime > 0.3)")
    page.locator("dialog video").first.evaluate("v => { v.currentTime = 2.9; }")
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.ended)")
    page.locator("dialog video").nth(1).evaluate("v => { v.currentTime = 1; }")  # wound back by hand while nothing plays
    page.wait_for_function("[...document.querySelectorAll('dialog video')].every(v => v.paused && Math.abs(v.currentTime - 1) < 0.05)")


@browser_needed
def test_a_card_shows_its_whole_contact_sheet_and_a_phone_can_read_it(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["review"].as_uri())
    page.wait_for_function("document.querySelector('.card img').naturalWidth > 0")
    shape = "i => [i.clientWidth / i.clientHeight, i.naturalWidth / i.naturalHeight, getComputedStyle(i).objectFit]"
    shown, drawn, fit = page.locator(".card img").first.evaluate(shape)
    assert (shown, fit) == (pytest.approx(drawn, rel=0.02), "fill")  # to a pixel: nothing is cut off or distorted
    page.set_viewport_size({"width": 400, "height": 900})
    page.locator(".card").first.click()
    page.wait_for_function("document.querySelector('dialog .sheet').naturalWidth > 0")
    assert page.locator("dialog .sheet").evaluate("i => i.clientWidth") >= 500  # five frames of a hundred pixels: it scrolls
    assert page.locator("dialog .strip").evaluate("d => d.clientWidth") <= 400


@browser_needed
@pytest.mark.parametrize("name", ["review", "pair", "leaderboard"])
@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_is_wider_than_its_window(page: Any, pages: dict[str, Path], name: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(pages[name].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if name == "leaderboard":  # who and how good can be read without scrolling
        cell = page.locator("tbody tr:first-child td:nth-child(2) span:first-child")
        assert page.locator("thead th").nth(1).inner_text() == "shop@fair"
        assert cell.evaluate("c => c.getBoundingClientRect().left") < width / 2
    else:
        page.locator(".card").first.click()
        assert page.evaluate("document.querySelector('dialog').scrollWidth <= document.querySelector('dialog').clientWidth")


@browser_needed
def test_nothing_of_a_run_becomes_markup(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["review"].as_uri())
    page.select_option("[data-filter=outcome]", "error")
    assert "</script><img src=x" in page.locator(".card:visible").first.text_content()
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("b:text('clerk'), b:text('smile')").count() == 0
    assert page.title() == "shop@fair, <b>clerk</b> (incomplete)"


@browser_needed
def test_a_click_on_a_heading_sorts_by_number(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["leaderboard"].as_uri())
    first = page.locator("tbody tr td:first-child").first
    heading = page.get_by_role("button", name="shop@fair")
    heading.click()
    assert first.inner_text() == "<b>clerk</b>"
    heading.click()
    assert first.inner_text() == "baker"
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("shop@fair")


@browser_needed
def test_pictures_of_episodes_far_down_are_not_loaded_yet(page: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(pages["review"].parent, tmp_path / "many")
    index = tmp_path / "many" / pages["review"].name
    text = (tmp_path / "many" / "episodes.js").read_text()
    episodes = json.loads(text.removeprefix("const EPISODES = ").removesuffix(";\n"))
    drawn = [episode for episode in episodes if episode["views"][0]["sheet"]]
    many = []
    for number in range(250):
        episode = json.loads(json.dumps(drawn[number % len(drawn)]))
        sheet = f"media/{number}.jpg"
        shutil.copy(tmp_path / "many" / episode["views"][0]["sheet"], tmp_path / "many" / sheet)
        episode["views"][0]["sheet"] = sheet
        many.append(episode)
    (tmp_path / "many" / "episodes.js").write_text(f"const EPISODES = {json.dumps(many)};\n")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(index.as_uri())
    page.wait_for_load_state("networkidle")
    assert page.locator("#count").inner_text() == "250 of 250 shown"
    assert 0 < sum(url.endswith(".jpg") for url in asked) < 150  # those in the window and a few screens below
    page.locator(".card").nth(249).scroll_into_view_if_needed()
    page.wait_for_function("document.querySelectorAll('.card img')[249].naturalWidth > 0")


def test_the_folder_can_be_moved_and_holds_all_it_shows(pages: dict[str, Path]) -> None:
    folder = pages["review"].parent
    text = (folder / "episodes.js").read_text()
    for episode in json.loads(text.removeprefix("const EPISODES = ").removesuffix(";\n")):
        for view in episode["views"]:
            for address in (view["video"], view["sheet"]):
                assert address is None or (folder / address).is_file()
    html = pages["review"].read_text()
    assert "http" not in html
    assert str(folder) not in html


def test_an_undrawn_episode_says_how_to_draw_it(pages: dict[str, Path], runs: tuple[RunFolder, RunFolder]) -> None:
    assert f"vla-eval render {runs[0].path} --episode 2/8" in (pages["review"].parent / "episodes.js").read_text()


def test_a_contact_sheet_runs_from_the_first_frame_to_the_last(tmp_path: Path) -> None:
    film(tmp_path / "film.mp4", 47)
    contact_sheet(tmp_path / "film.mp4", tmp_path / "sheet.jpg")
    from PIL import Image

    sheet = np.asarray(Image.open(tmp_path / "sheet.jpg").convert("L"), float)
    rows, columns = sheet.shape[0] // 2, sheet.shape[1] // 5
    means = [sheet[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns].mean() for r in range(2) for c in range(5)]
    assert means == sorted(means)
    assert means[0] < 15
    assert means[-1] > 240
    assert (columns, rows) == (320, 214)  # 96 × 64, to the next even height


def test_a_film_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(base64.b64decode("bm90IGEgZmlsbQ=="))
    with pytest.raises(BadRequest, match=r"film\.mp4: no contact sheet"):
        contact_sheet(tmp_path / "film.mp4", tmp_path / "sheet.jpg")
    assert not list(tmp_path.glob("*.jpg"))


def test_an_empty_run_has_no_pages(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path, only=0)
    with pytest.raises(BadRequest, match="no episode has been played"):
        review(folder, tmp_path / "pages")
    assert not (tmp_path / "pages").exists()


def test_one_slow_answer_does_not_hide_the_others(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path, tasks=1)
    even = (review(folder, tmp_path / "even").parent / "latency.svg").read_text()
    assert ">p90 " in even
    assert "deadline" not in even  # none was late
    arrays = folder.episode("shop@fair/0", 0)
    seconds = arrays.request_seconds.copy()
    seconds[0, -1] = 12.0
    folder.write_episode("shop@fair/0", 0, replace(arrays, request_seconds=seconds))
    svg = (review(folder, tmp_path / "uneven").parent / "latency.svg").read_text()
    assert ">deadline 200 ms<" in svg  # four steps at 20 Hz
    assert {">100<", ">1000<", ">10000<"} <= set(re.findall(r">\d+<", svg))  # decades: twelve seconds are no mile away


def test_the_same_run_makes_the_same_bytes(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path)
    for name in ("one", "two"):
        review(folder, tmp_path / name)
    for file in ("index.html", "episodes.js", "success.svg", "failures.svg", "latency.svg"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
