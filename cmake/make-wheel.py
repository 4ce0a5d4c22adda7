#!/usr/bin/env python3
"""Makes a wheel of a build, and prints its name.

    cmake/make-wheel.py BUILD-FOLDER OUTPUT-FOLDER

A wheel has what `cmake --install` installs, as a Python package beside torch of PyPI, with which the build was made. The
folder of torch on this machine becomes the way from each file to the folder where pip puts both.
"""
import base64
import hashlib
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

MODULE = '''"""The program lockstep. The C++ library beside it is found by `lockstep --cmake-dir`."""
import os
import pathlib
import sys


def main():
    program = str(pathlib.Path(__file__).parent / "bin" / "lockstep")
    os.execv(program, [program, *sys.argv[1:]])
'''
METADATA = """Metadata-Version: 2.1
Name: lockstep
Version: {version}
Summary: Trains a neural network on several devices at once, in C++ on LibTorch: a library and a program
License: BSD-3-Clause
License-File: LICENSE
Requires-Dist: torch=={torch}
"""


def with_run_path(program, site, way):
    """Gives the program with the libraries of `site` found by the way, in the room that the old path leaves."""
    said = subprocess.run(["readelf", "-d", program], check=True, capture_output=True, text=True)
    old = re.search(r"\((?:RUN|R)PATH\).*\[(.*)\]", said.stdout)[1].encode()
    new = old.replace(site, way)
    if len(new) > len(old):
        sys.exit(f"error: {site.decode()} has a shorter name than {way.decode()}, which must take its place")
    return program.read_bytes().replace(old + b"\0", new.ljust(len(old), b"\0") + b"\0")


def package_of(build, site):
    """Yields the name in the wheel, the bytes, and the file, of each installed file."""
    with tempfile.TemporaryDirectory() as prefix:
        subprocess.run(["cmake", "--install", build, "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)
        for file in sorted(pathlib.Path(prefix).rglob("*")):
            name = file.relative_to(prefix)
            up = "/".join([".."] * len(name.parts))
            if file.is_dir():
                continue
            if name.parts[0] == "bin":
                data = with_run_path(file, site, f"$ORIGIN/{up}".encode())
            else:
                here = {".cmake": "${CMAKE_CURRENT_LIST_DIR}", ".pc": "${pcfiledir}"}.get(file.suffix)
                data = file.read_bytes()
                data = data.replace(site, f"{here}/{up}".encode()) if here else data
            yield ("{data}/" if name.parts[0] == "share" else "lockstep/") + str(name), data, name.parts[0] == "bin"


def main():
    build, output = map(pathlib.Path, sys.argv[1:])
    cache = dict(re.findall(r"^(\w+):\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M))
    version, torch = cache["CMAKE_PROJECT_VERSION"], pathlib.Path(cache["Torch_DIR"]).parents[2]
    of_pip = list(importlib.metadata.distributions(name="torch", path=[str(torch.parent)]))
    if torch.name != "torch" or not of_pip:
        sys.exit(f"error: {torch} is not torch as pip installs it, which a wheel needs; ./dev fetches it")
    tag = "py3-none-" + sysconfig.get_platform().replace("-", "_")
    name = f"lockstep-{version}"
    files = [(place.format(data=f"{name}.data/data"), *rest) for place, *rest in package_of(build, str(torch.parent).encode())]
    files += [("lockstep/__init__.py", MODULE.encode(), False)]
    for file, text in {
        "METADATA": METADATA.format(version=version, torch=of_pip[0].version.split("+")[0]),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "licenses/LICENSE": (pathlib.Path(__file__).parent.parent / "LICENSE").read_text(),
        "entry_points.txt": "[console_scripts]\nlockstep = lockstep:main\n",
    }.items():
        files.append((f"{name}.dist-info/{file}", text.encode(), False))
    record = f"{name}.dist-info/RECORD"
    lines = []
    for place, data, _ in files:
        hash = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        lines.append(f"{place},sha256={hash},{len(data)}\n")
    files.append((record, "".join([*lines, f"{record},,\n"]).encode(), False))
    wheel = output / f"{name}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, data, is_program in files:
            entry = zipfile.ZipInfo(place)
            entry.external_attr, entry.compress_type = (0o100755 if is_program else 0o100644) << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    print(wheel)


main()
