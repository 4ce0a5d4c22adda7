#!/usr/bin/env python3
"""Compares docs/core.md with the public names of the core: types, functions and enums at namespace level that
lockstep/lockstep.hpp makes visible. Overloads count once, and a module holder and its Impl as one. Members, enumerators,
deprecated names and what is in lockstep::detail do not count."""
import pathlib
import re
import sys

MOST = 56
root = pathlib.Path(__file__).resolve().parent.parent.parent
include = root / "include"


def visible(header, seen):
    if header not in seen:
        seen[header] = header.read_text()
        for other in re.findall(r"#\s*include <(lockstep/[^>]+)>", seen[header]):
            visible(include / other, seen)
    return seen


def without(text, opening, closing, begin):
    """The text without the balanced brackets that begin at `begin`."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return text[:begin] + text[i + 1:]
    return text[:begin]


def declarations(text):
    """(namespaces, declaration) of everything at namespace level; bodies are {}."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)
    text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
    namespaces, depth, now = [], 0, ""
    for c in text:
        if c == "{":
            opened = re.search(r"\bnamespace\s+([\w:]+)\s*$", now) if depth == len(namespaces) else None
            if opened:
                namespaces.append(opened[1])
            elif depth == len(namespaces):
                now += "{}"
            depth += 1
            if opened:
                now = ""
        elif c == "}":
            depth -= 1
            if depth < len(namespaces):
                namespaces.pop()
                now = ""
            elif depth == len(namespaces) and re.search(r"\)[^={}]*\{\}$", now) and "requires {}" not in now[-14:]:
                yield tuple(namespaces), now  # a function's body ends it without a semicolon
                now = ""
        elif depth == len(namespaces):
            if c == ";" or (c == ")" and now.strip().startswith("TORCH_MODULE")):
                yield tuple(namespaces), now + c
                now = ""
            else:
                now += c


def name_of(declaration):
    text = " ".join(declaration.split())
    if "deprecated" in text or not text.strip("; ") or text.startswith(("using namespace", "static_assert")):
        return None
    while text.startswith("template"):
        text = without(text, "<", ">", text.index("<")).removeprefix("template").strip()
    text = re.sub(r"\brequires requires ?\{\}", "", text)
    while match := re.search(r"\brequires ?\(", text):
        text = without(text, "(", ")", match.end() - 1).replace("requires", "", 1).strip()
    if match := re.match(r"(?:class|struct|union|enum(?: class)?) (?:\[\[\w+\]\] )?(\w+)", text):
        return match[1] if "{" in text else None
    if match := re.match(r"(?:using|concept) (\w+)", text) or re.match(r"TORCH_MODULE\w*\((\w+)", text):
        return match[1]
    match = re.search(r"(\w+) ?\(", text) or re.search(r"(\w+) ?(?:=.*|\{\})?;", text)
    return None if not match or "operator" in text.split("(")[0] else match[1]


if __name__ == "__main__":
    names = set()
    for text in visible(include / "lockstep/lockstep.hpp", {}).values():
        names |= {name_of(declaration) for namespaces, declaration in declarations(text)
                  if not {"detail", "lockstep::detail"} & set(namespaces)}
    names.discard(None)
    names -= {name for name in names if name.removesuffix("Impl") in names and name.endswith("Impl")}
    page = (root / "docs/core.md").read_text()
    told = re.findall(r"^\| `(\w+)` \|", page, flags=re.M)

    wrong = [f"docs/core.md lacks `{name}`, which lockstep.hpp makes visible" for name in sorted(names - set(told))]
    wrong += [f"docs/core.md has `{name}`, which lockstep.hpp does not make visible" for name in sorted(set(told) - names)]
    wrong += [f"docs/core.md has `{name}` twice" for name in sorted({name for name in told if told.count(name) > 1})]
    if len(names) > MOST:
        wrong.append(f"lockstep.hpp makes {len(names)} names visible, and {MOST} are the most: make one a member, or private")
    print("\n".join(wrong) or f"the core has {len(names)} names")
    sys.exit(bool(wrong))
