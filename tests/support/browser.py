"""Opens the pages of `fourfold view` in headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

PROGRAMS: Final = ("chromium", "chromedriver")
"""From the Debian packages chromium and chromium-driver."""
_FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,860",
)  # fmt: skip
_START_SECONDS: Final = 120.0
_PAGE_SECONDS: Final = 60.0
# `fourfold view`, also where its entry point is not installed.
_COMMAND: Final = (
    "import argparse, sys; from fourfold_coordinator.cli import view; parser = argparse.ArgumentParser(); "
    "view.add_arguments(parser); sys.exit(view.main(parser.parse_args()))"
)


def missing() -> list[str]:
    """Return what is not installed of a browser and its driver."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def open_browser(profile: Path) -> Iterator[WebDriver]:
    """Start Chromium with an empty profile in the new folder `profile`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver") or ""))
    try:
        driver.set_page_load_timeout(_PAGE_SECONDS)
        yield driver
    finally:
        driver.quit()


@contextmanager
def serve(runs: Sequence[Path], *options: str, env: dict[str, str]) -> Iterator[str]:
    """Start `fourfold view`; yield the address of the list of runs, without the last slash."""
    command = [sys.executable, "-c", _COMMAND, *map(str, runs), "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    limit = threading.Timer(_START_SECONDS, process.kill)  # `readline` has no limit of its own
    limit.start()
    try:
        found = re.search(r"https?://[^\s]+", process.stdout.readline())
        limit.cancel()
        if found is None:
            code = process.wait(_START_SECONDS)
            raise RuntimeError(
                f"`fourfold view` printed no address within {_START_SECONDS:g} s, or ended: exit code {code}"
            )
        yield found.group().rstrip("/")
    finally:
        limit.cancel()
        process.terminate()
        process.wait(_PAGE_SECONDS)
        process.stdout.close()
