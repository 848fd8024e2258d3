"""Every page of `fourfold view` in headless Chromium, over finished runs and one in progress."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.stage import Stage, until
from tests.support import browser
from tests.support.view_run import append_step, trajectory, write_run

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

selenium = pytest.importorskip("selenium", reason="needs selenium")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(browser.missing()), reason=f"not installed: {browser.missing()}"),
    # Of selenium itself.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with browser.open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve two finished runs; yield the address."""
    root = tmp_path_factory.mktemp("finished")
    one, two = write_run(root / "one"), write_run(root / "two", rate=1e-4)
    words = "".join(f"w{index:05d} " for index in range(1000))
    append_step(one, 4, [trajectory("h4-0-0", words, step=4)])
    with browser.serve([one, two], env={**os.environ, "XDG_CACHE_HOME": str(root / "cache")}) as address:
        yield address


def script(driver: WebDriver, text: str) -> Any:
    return driver.execute_script(text)


def text_of(driver: WebDriver) -> str:
    return str(script(driver, "return document.body.innerText"))


def log_of(driver: WebDriver) -> list[Any]:
    """Return the new lines of the browser's console."""
    return list(driver.get_log("browser"))  # type: ignore[no-untyped-call]


def wait(driver: WebDriver, condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, text_of(driver)
        time.sleep(0.1)


def wait_for_texts(driver: WebDriver, texts: Sequence[str]) -> None:
    """Load the page again until it has all texts."""

    def found() -> bool:
        if all(text in text_of(driver) for text in texts):
            return True
        driver.refresh()
        return False

    wait(driver, found)


def check(driver: WebDriver) -> None:
    """Check that no text of a sample ran as a script, nothing was refused by the policy, and no script failed."""
    assert script(driver, "return window.hacked") is None
    assert script(driver, "return document.images.length") == 0
    assert log_of(driver) == []


def test_every_page_of_a_finished_run(driver: WebDriver, finished: str) -> None:
    for path, texts in (
        ("/", ["one", "two", "finished", "4 of 9", " days ago"]),
        (
            "/run/one",
            ["Alarms", "raise sampling.temperature", "reward/mean", "2026", " days ago)", "Findings of the whole run"],
        ),
        ("/run/one/samples", ["10 trajectories", "<script>", "STALE", "apples"]),
        ("/run/one/samples?text=apples&score_to=0", ["3 trajectories"]),
        ("/run/one/sample/p2-0-0", ["turn 1, sampled", "Before and after", "The group: 2 trajectories"]),
        ("/run/one/answers", ["before", "<script>", "step 3"]),
        ("/run/one/timeline?step=3", ["rollout-0<b>", "training loop"]),
        ("/run/one/weights", ["no updates are in progress"]),
        ("/run/one/recipe?other=two", ["trainer.learning_rate"]),
        ("/compare?run=one&run=two", ["Differences of the recipes", "trainer.learning_rate", "0.0001"]),
    ):
        driver.get(finished + path)
        shown = text_of(driver)
        assert not [text for text in texts if text not in shown], f"{path}: {shown}"
        check(driver)
    driver.get(f"{finished}/run/nothing")
    assert "no run has the name 'nothing'" in text_of(driver)
    assert "404" in str(log_of(driver))


def test_a_user_searches_opens_a_trajectory_and_colors_its_tokens(driver: WebDriver, finished: str) -> None:
    driver.get(f"{finished}/run/one/samples")
    field = driver.find_element("name", "text")
    field.send_keys("apples 2")
    field.submit()
    wait(driver, lambda: "1 trajectory" in text_of(driver))
    driver.find_element("css selector", ".samples a").click()
    wait(driver, lambda: "p2-0-1" in driver.title)
    color = "return getComputedStyle(document.querySelector('.sampled pre span')).backgroundColor"
    first = script(driver, color)
    driver.find_element("css selector", "input[value=advantage]").click()
    assert script(driver, color) not in (first, "rgba(0, 0, 0, 0)")
    driver.find_element("css selector", "input[value=version]").click()
    assert "version 1" in str(driver.find_element("css selector", ".sampled pre span").get_attribute("title"))
    driver.get(f"{finished}/run/one/sample/h4-0-0")
    assert (
        "of 7,014" in text_of(driver) and script(driver, "return document.querySelectorAll('pre span').length") == 2000
    )
    driver.find_element("partial link text", "more").click()
    wait(driver, lambda: "2000 to 4000" in text_of(driver))
    check(driver)


def test_values_under_the_pointer_and_chosen_metrics(driver: WebDriver, finished: str) -> None:
    driver.get(f"{finished}/run/one")
    script(
        driver,
        "const c = document.querySelector('svg[data-chart]'), b = c.getBoundingClientRect(), clientX = b.right - 9;"
        "c.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX, clientY: b.top + 9}))",
    )
    assert driver.find_element("css selector", ".tip").text == "one, step 4: 0.4"
    driver.find_element("css selector", ".choose summary").click()
    for box in driver.find_elements("css selector", ".choose input:checked"):
        box.click()
    driver.find_element("css selector", ".choose input[value='time/train']").click()
    driver.find_element("css selector", ".choose form").submit()
    wait(driver, lambda: "m=time" in driver.current_url)
    assert script(driver, "return document.querySelectorAll('svg[data-chart]').length") == 1
    check(driver)


async def test_every_page_of_a_run_in_progress(driver: WebDriver, tmp_path: Path) -> None:
    """A real coordinator with toy services: the page follows it until it is killed."""
    stage = Stage(tmp_path, steps=100_000)
    try:
        await stage.start()
        await _look_until_it_is_killed(driver, stage, tmp_path / "cache")
    finally:
        await stage.close()


async def _look_until_it_is_killed(driver: WebDriver, stage: Stage, cache: Path) -> None:
    await until(lambda: (stage.folder / "metrics.jsonl").exists() and len(stage.lines("metrics.jsonl")) > 3, 60)
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with browser.serve([stage.folder], env=env) as address:
        await asyncio.to_thread(_look_at_a_run_in_progress, driver, f"{address}/run/{stage.folder.name}")
        await stage.kill()
        await asyncio.to_thread(
            wait, driver, lambda: driver.find_element("css selector", "header .state").text == "stopped"
        )
    check(driver)


def _look_at_a_run_in_progress(driver: WebDriver, run: str) -> None:
    for path, texts in (
        ("/timeline", ["rollout-0", "trainer-0", "reward-0", "training loop"]),
        ("/weights", ["no update in progress", "rollout-0", "serving", "weights/publish_seconds"]),
        ("/answers", ["before", "step 0"]),
        ("/recipe", ["batch.group_size"]),
        ("/samples", ["trajectories"]),
    ):
        driver.get(run + path)
        wait_for_texts(driver, texts)
        check(driver)
    link = "document.querySelector('.samples a')"
    wait(driver, lambda: script(driver, f"return {link} !== null"))
    driver.get(script(driver, f"return {link}.href"))
    assert "turn 1, sampled" in text_of(driver) and "nats" in text_of(driver)
    check(driver)
    driver.get(run)
    fact = "return document.querySelector('.facts dd').textContent"
    before = script(driver, fact)
    wait(driver, lambda: script(driver, fact) != before)
    assert "running" in text_of(driver)
    check(driver)
