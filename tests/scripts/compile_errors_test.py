#!/usr/bin/env python3
"""Compiles programs with a common mistake each, and holds the first error against the program's first line, which has
a regular expression after "Says:". So a user's first line of the compiler's output says what to write instead.
  compile_errors_test.py COMPILE-COMMANDS FOLDER
The flags, with a precompiled header, are those of tests/support/main.cpp."""
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

commands, folder = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
entry = next(e for e in json.loads(commands.read_text()) if e["file"].endswith("/tests/support/main.cpp"))
flags = shlex.split(entry["command"])
for option in ("-o", "-c"):  # each with its file
    del flags[flags.index(option):flags.index(option) + 2]


def first_error(program):
    run = subprocess.run([*flags, "-fsyntax-only", program], cwd=entry["directory"], capture_output=True, text=True)
    return re.search(r": (?:error|warning): (.*)", run.stderr + ": error: the program compiles")[1]


programs = sorted(folder.glob("*.cpp"))
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    errors = list(pool.map(first_error, programs))
wrong = [(program.name, expected, error) for program, error in zip(programs, errors)
         if not re.search(expected := program.read_text().splitlines()[0].removeprefix("// Says: "), error)]
for name, expected, error in wrong:
    print(f"{name}: the compiler says\n  {error}\nwhich has no\n  {expected}")
print(f"{len(programs)} programs with a mistake, of which {len(wrong)} say something else")
sys.exit(1 if wrong or not programs else 0)
