"""Makes Markdown of sources: of a public header its names with what is said of each, of an example its text, code and
output, of any other source its code."""
import functools
import os
import re
import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent.parent
include = root / "include/lockstep"
sys.path.insert(0, str(root / "tests/scripts"))
from core_names_test import declarations, name_of  # noqa: E402

languages = {".hpp": "cpp", ".cpp": "cpp", ".py": "python", ".sh": "sh", ".json": "json", ".cmake": "cmake",
             ".txt": "text"}
path_or_word = re.compile(r"[\w-]+(?:/[\w-]+)*\.(?:hpp|cpp|md)\b|~?\w+(?:::~?\w+)*(?:\(\))?")
looks_like_code = re.compile(r"::|_|\(\)|\.(?:hpp|cpp|md)$")


def code_block(lines, language):
    return f"````{language}\n" + "\n".join(lines) + "\n````\n"


def names_in(code):
    """The public names of declarations. A module holder and its Impl have one."""
    names = filter(None, (name_of(text) for _, text in declarations("\n".join(code))))
    return list(dict.fromkeys(name.removesuffix("Impl") for name in names))


def items(lines):
    """(comment, code) for each declaration, or group of them, under one comment."""
    comment, code, depth = [], [], 0
    for line in [*lines, ""]:
        bare = re.sub(r'"(?:[^"\\]|\\.)*"|//.*', "", line)
        if depth == 0 and (not line or line.startswith("//")) and code:
            yield comment, code
            comment, code = [], []
        if depth == 0 and not code and line.startswith("//"):
            comment.append(line)
        elif line or depth:
            code.append(line)
            depth += sum(map(bare.count, "{(")) - sum(map(bare.count, "})"))
            if depth == 0 and line == "};":
                yield comment, code
                comment, code = [], []
        elif comment:
            yield comment, []
            comment = []


def public_part(lines):
    """What a class shows, of the lines between its braces."""
    public = False
    for line in lines:
        if re.fullmatch(r" (public|private|protected):", line):
            public = line == " public:"
        elif public and not line.startswith("  friend "):
            yield line.removeprefix("  ")


def without_body(code):
    if len(code) == 1 or code[-1] != "}" or re.search(r"^(?:class|struct|enum|union) ", "\n".join(code), re.M):
        return code
    end = next(number for number, line in enumerate(code) if line.endswith("{"))
    return [*code[:end], code[end].removesuffix(" {") + ";"]


def within_namespace(text):
    text = re.sub(r"^namespace detail \{$.*?^\}  // namespace detail$", "", text, flags=re.M | re.S)
    found = re.findall(r"^namespace lockstep \{$(.*?)^\}  // namespace lockstep$", text, flags=re.M | re.S)
    return "\n".join(found).splitlines()


def sections(header):
    """(names that get a heading here, comment, code) for each declaration."""
    known = set()
    for comment, code in items(within_namespace(header.read_text())):
        names = names_in(code)
        if names or not code:
            yield [name for name in names if name not in known], comment, code
            known.update(names)


@functools.cache
def places(headers):
    """Where each public name stands: a header, and the heading's anchor."""
    return {name: (header, "-".join(names).lower())
            for header in headers for names, _, _ in sections(header) for name in names}


def linked(match, path, headers):
    """A word of a comment: a name or a file that has a page is a link, other code is set as code. "Parts" or "Step" at
    the beginning of a sentence is no name."""
    word, before = match[0], match.string[:match.start()]
    name = word.removesuffix("()").removeprefix("lockstep::").split("::")[0]
    folders = (root, path.parent, include.parent) if "." in word else ()
    file = next((folder / word for folder in folders if (folder / word).exists()), None)
    if file in headers or file and file.suffix == ".md":
        return f"[{word}]({os.path.relpath(file, path.parent)})"
    is_name = re.search(r"[a-z][A-Z]", name) or name[0].isupper() and re.search(r"[a-z,(] $", before)
    if not (is_name and name in places(headers)) and not looks_like_code.search(word):
        return word
    if name not in places(headers):
        return f"`{word}`"
    there, anchor = places(headers)[name]
    return f"[`{word}`]({os.path.relpath(there, path.parent)}#{anchor})"


def prose(comment, path, headers):
    """A comment as Markdown: what stands further to the right in it is code, or a table."""
    text, block, listed = "", [], False
    for line in [line.removeprefix("//").removeprefix(" ") for line in comment] + ["."]:  # "." ends a block
        listed = line.startswith("- ") or listed and line.startswith("  ")
        if line.startswith("  ") and not listed or block and not line:
            block.append(line.removeprefix("  "))
            continue
        if block:
            is_code = re.search(r"[;{]$", "\n".join(block), re.M)
            text += "\n" + code_block("\n".join(block).rstrip().split("\n"), "cpp" if is_code else "text") + "\n"
            block = []
        parts = line.split("`")
        for i, part in enumerate(parts):
            if i % 2:
                parts[i] = f"`{part}`"
            else:
                part = re.sub(r"[][*<$\\]", lambda match: "\\" + match[0], part)
                parts[i] = path_or_word.sub(lambda match: linked(match, path, headers), part)
        text += "".join(parts) + "\n"
    return text.removesuffix(".\n")


def entry(comment, code, path, headers):
    """The code, and under it what is said of it; a class with what its members' comments say."""
    said = prose(comment, path, headers) if comment else ""
    if re.search(r"^class [^;]*\{$", "\n".join(code), re.M) and any(line.startswith("  //") for line in code):
        head = next(number for number, line in enumerate(code) if line.endswith("{"))
        shown = re.sub(r"\)\s+: .*\{\}$", ");", "\n".join(public_part(code[head + 1:-1])), flags=re.M).splitlines()
        text = code_block([*code[:head], code[head].removesuffix(" {") + ";"], "cpp") + "\n" + said + "\n"
        return text + "".join(entry(*item, path, headers) for item in items(shown))
    return (code_block(without_body(code), "cpp") + "\n" if code else "") + said + "\n"


def header_page(path, headers):
    top, _, rest = path.read_text().partition("#pragma once")
    includes = [include.parent / name for name in re.findall(r"#include <(lockstep/.*?)>", rest)]
    text = f"# `{path.relative_to(include)}`\n\n{prose(top.strip().splitlines(), path, headers)}\n"
    text += code_block([f"#include <{path.relative_to(include.parent)}>"], "cpp") + "\n"
    for names, comment, code in sections(path):
        text += f"## {', '.join(f'`{name}`' for name in names)}\n\n" if names else ""
        text += entry(comment, code, path, headers)
    if "namespace" not in rest:  # it only gathers others
        entries = sorted(path.parent.glob("*.hpp")) if path.name == "all.hpp" else includes
        text += "\n```{toctree}\n" + "".join(
            f"/{other.relative_to(root).with_suffix('')}\n" for other in entries if other != path) + "```\n"
    return text


def markdown(path, headers):
    headers = tuple(headers)
    if path in headers:
        return header_page(path, headers)
    name, lines = str(path.relative_to(root)), path.read_text().splitlines()
    if path.parent == root / "examples":
        end = next(number for number, line in enumerate(lines) if not line.startswith("//"))
        return f"# `{path.name}`\n\n{prose(lines[:end], path, headers)}\n{code_block(lines[end:], 'cpp')}"
    text = f"# `{name}`\n\n" + code_block(lines, languages[path.suffix])
    source = path.with_suffix(".cpp")
    if path.suffix == ".hpp" and source.exists():
        text += f"\n## `{source.name}`\n\n" + code_block(source.read_text().splitlines(), "cpp")
    return text
