#!/usr/bin/env python3
"""Opens the site of ./dev docs in headless Chromium, from its folder: the front page, a search, what it found, and the
switch to dark. Nothing on the site comes from elsewhere, and an example has its output.

site_browser_test.py SITE [FOLDER]: skips itself (77) where Chromium is not installed. With FOLDER, screenshots stay
there.
"""
import html
import re
import sys
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from browser import opened

site = Path(sys.argv[1]).resolve()
shots = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None


def shown(address, dark=False):
    return opened(address, 1400, dark, "--dump-dom")


def after(page, deed):
    """The page on which a person lands who does this on that page. furo's words about its colours are no error."""
    tried = page.with_name("tried-" + page.name)
    script = f"<script>addEventListener('load', () => {{console.log = () => {{}}; {deed}}})</script>"
    tried.write_text(page.read_text().replace("</body>", script + "</body>"))
    try:
        return shown(tried.as_uri())
    finally:
        tried.unlink()


for page in site.rglob("*.html"):
    for used in re.findall(r'<(?:script|link|img|source|iframe)\b[^>]*?\b(?:src|href)="([^"]*)"', page.read_text()):
        assert not urlsplit(used).scheme or used.startswith("data:"), f"{page}: {used}"

front = site / "README.html"
assert "<h1>lockstep" in shown((site / "index.html").as_uri()), "the site's first page is not the README"
toggle = "document.querySelector('.content-icon-container .theme-toggle').click();"
assert 'data-theme="dark"' in after(front, toggle), "the page does not become dark"

for word, wanted in (("train_batch", "include/lockstep/scratch/train_batch.html#train-batch"),
                     ("straggler", "docs/guide.html"), ("evaluate_accuracy_gpu", "docs/d2l-map.html")):
    found = after(front, "const box = document.querySelector('input.sidebar-search');"
                         f"box.value = '{word}'; box.form.submit();")
    links = re.findall(r'<li[^>]*>\s*<a href="([^"]*)"', found.partition('id="search-results"')[2])
    results = [html.unescape(link) for link in links]
    at = next((link for link in results if urlsplit(link)._replace(query="").geturl() == wanted), None)
    assert at, f"a search for {word} does not find {wanted}, but {results}"
    page = shown(urljoin(site.as_uri() + "/", at))
    assert word in page and urlsplit(at).fragment in ("", *re.findall(r'\bid="([^"]*)"', page)), at

assert "after allreduce:\n 3  3" in (site / "examples/01_from_scratch.html").read_text(), "no output of an example"

if shots:
    for name in ("README", "docs/d2l-map", "docs/guide", "include/lockstep/data/data", "examples/01_from_scratch"):
        for width, dark in ((400, False), (400, True), (1400, False), (1400, True)):
            picture = shots / f"{Path(name).name}-{width}-{'dark' if dark else 'light'}.png"
            opened((site / name).with_suffix(".html").as_uri(), width, dark, f"--screenshot={picture}")
print("1 passed, 0 failed")
