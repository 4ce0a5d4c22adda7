"""The site that ./dev docs makes: the repository's Markdown as it stands, and pages of the sources that it links.

Sphinx reads the files in place. A header, an example or another source becomes Markdown by source_pages.py when it is
read. Links are those that GitHub follows; what only the site has is the lists at its side.
"""
import os
import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True
here = Path(__file__).resolve().parent
root = here.parent.parent
sys.path.insert(0, str(here))
import source_pages  # noqa: E402

project, html_title = "lockstep", "lockstep"
root_doc = "README"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_copy_source = html_show_sphinx = html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["static"]
html_search_scorer = str(here / "scorer.js")
html_css_files, html_js_files = ["site.css"], ["site.js"]
pygments_style, pygments_dark_style = "default", "github-dark"
# Not all pages have a place at the side, and "…" in a block is no C++.
suppress_warnings = ["toc.not_included", "misc.highlighting_failure"]

link = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)")
pages = [root / "README.md", root / "CHANGELOG.md", *root.glob("docs/**/*.md"), *root.glob("*/**/README.md")]
pages = [page for page in pages if "build" not in page.relative_to(root).parts]
headers = sorted(root.glob("include/lockstep/**/*.hpp"))
examples = sorted(root.glob("examples/*.cpp"))
linked = {Path(os.path.normpath(page.parent / target)) for page in pages for target in link.findall(page.read_text())}
sources = {path for path in linked if path.is_file() and path.suffix in source_pages.languages} | {*headers, *examples}
# A .cpp stands on the page of the .hpp beside it: a page has one address, whatever its source's suffix.
sources = {path.with_suffix(".hpp") if path.with_suffix(".hpp").exists() else path for path in sources}
include_patterns = [str(path.relative_to(root)) for path in {*pages, *sources}]
exclude_patterns = ["build", "runs", ".git"]
source_suffix = {suffix: "markdown" for suffix in [".md", *source_pages.languages]}

# The lists at the side, by page.
lists = {
    "README": {
        "Start": ["The book, line by line </docs/d2l-map>", "/docs/guide", "/examples/README", "/docs/commands",
                  "/docs/core"],
        "Headers": ["/include/lockstep/" + name
                    for name in ("lockstep", "split", "models", "lab", "survive", "book", "fit")],
        "More": ["/docs/large-batches", "/docs/same-bits", "/docs/processes", "/docs/faults", "/docs/plan",
                 "/docs/algorithms", "/docs/words", "/docs/results/README", "/CHANGELOG"],
        "Inside": ["/docs/tour", "/docs/decisions/README", "/docs/simulated-device", "/docs/simulation"]},
    "docs/guide": {"Programs": [f"guide/{page.stem}" for page in sorted(root.glob("docs/guide/*.md"))]},
    "examples/README": {"Examples": [example.stem for example in examples]},
}


def page_of_folder(folder):
    while not (folder / "README.md").exists():
        folder = folder.parent
    return folder / "README.md"


def as_markdown(app, name, text):
    path = Path(app.env.doc2path(name))
    if path.suffix != ".md":
        text[0] = source_pages.markdown(path, headers)
    else:
        def target(match):
            there = path.parent / match[1]
            return os.path.relpath(page_of_folder(there.resolve()), path.parent) if there.is_dir() else match[1]
        text[0] = link.sub(target, text[0])
    for caption, entries in lists.get(name, {}).items():
        text[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])


def front_page(app, error):
    to_readme = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n'
    (Path(app.outdir) / "index.html").write_text(to_readme)


def setup(app):
    app.connect("source-read", as_markdown)
    app.connect("build-finished", front_page)

highlight_language = "none"  # blocks without a language are output of programs
smartquotes_action = "qe"  # "--help" keeps its dashes
