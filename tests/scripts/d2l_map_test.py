#!/usr/bin/env python3
"""Fails if docs/d2l-map.md sets a line of ours beside the book's that our code does not have: example 01, the library's
functions of the section, or the README."""
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parent.parent.parent
files = [root / "examples/01_from_scratch.cpp", root / "README.md", root / "include/lockstep/models/models.hpp",
         *root.glob("src/scratch/*.cpp")]
sources = " ".join(" ".join(file.read_text().split()) for file in files)
part = (root / "docs/d2l-map.md").read_text().partition("## Each function, line by line\n")[2].partition("\n## ")[0]
ours = [line.split(" | ")[-1] for line in part.splitlines() if line.startswith("| ")]
pieces = [piece.strip() for cell in ours for code in re.findall(r"`([^`]+)`", cell) for piece in code.split("…")]
wrong = [piece for piece in pieces if piece.removesuffix("()") not in sources]
print("\n".join(f"docs/d2l-map.md: our code has no such line: {piece}" for piece in wrong) or
      f"{len(pieces)} pieces of lines are there")
sys.exit(bool(wrong) or len(pieces) < 50)
