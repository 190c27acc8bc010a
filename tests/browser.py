"""A real browser without a head, for tests of pages.

    apt-get install chromium

installs the browser; without one the tests that need it are skipped.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_browser = pytest.mark.skipif(
    not BROWSER, reason="no browser: apt-get install chromium installs one"
)

QUIET = (
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
"""The browser asks its maker for updates; the resolver of names is off, whatever it does."""

MAKER = re.compile(r"https?://[\w.-]*\b(google|googleapis|gvt1|gstatic)\.com/")


def browse(url: str, *options: str) -> tuple[str, str]:
    """The page's text after its scripts, and what the browser says of it."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--virtual-time-budget=4000", "--dump-dom", *QUIET, *options, url],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.stdout, done.stderr


def found_in(dom: str, said: str) -> Any:
    """JSON that a script of a test left in `<pre id="found">`."""
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)
    assert found is not None, dom[-500:] + said[-500:]
    return json.loads(html.unescape(found[1]))


def width_on_a_phone(page: Path) -> int:
    """Width of a page at 390 px, in a frame: a window without a head is never below 500."""
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<iframe id="f" src="{page.name}" style="width:390px;height:900px;border:0"></iframe>'
        '<pre id="found"></pre><script>addEventListener("load", () => {'
        ' const page = document.getElementById("f").contentDocument.documentElement;'
        ' document.getElementById("found").textContent = page.scrollWidth; });</script>'
    )
    width = found_in(*browse(frame.as_uri(), "--allow-file-access-from-files"))
    return int(width)
