#!/usr/bin/env python3
"""Packs mcl-train and mcl-eval into a Python wheel that runs on the libtorch of the `torch` package.

    make wheel                       builds both programs and calls this
    pip install dist/mcl-*.whl       brings torch, and the commands mcl-train and mcl-eval

The programs lie inside the package and look for libtorch in `torch/lib` beside it. Nothing is compiled where they are installed, and any
Python that torch has wheels for will do. No path of this machine stays in the files.
"""

import argparse
import base64
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile

PROGRAMS = ["mcl-train", "mcl-eval"]
TORCH = "2.13.0"
# From mcl/bin in site-packages to torch/lib beside it.
RUNPATH = b"$ORIGIN/../../torch/lib"
DT_NEEDED, DT_RPATH, DT_RUNPATH, SHT_DYNAMIC = 1, 15, 29, 6

STARTER = '''"""Starts the programs of mcl, which lie in this package."""

import importlib.util
import os
import re
import sys


def _start(name):
    here = os.path.dirname(os.path.abspath(__file__))
    torch = os.path.join(os.path.dirname(here), "torch")
    if not os.path.isdir(os.path.join(torch, "lib")):
        # torch is in another folder of Python's: the programs are told where. It is looked for, not imported.
        found = importlib.util.find_spec("torch")
        if found is None or not found.origin:
            sys.exit(name + ": there is no torch; `pip install torch==TORCH` brings it")
        torch = os.path.dirname(found.origin)
        lib = os.path.join(torch, "lib")
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [lib, os.environ.get("LD_LIBRARY_PATH")]))
    # Another torch has other symbols, of which the loader would name one.
    try:
        with open(os.path.join(torch, "version.py")) as file:
            version = re.search(r"__version__ = '([^'+]*)", file.read())
    except OSError:
        version = None
    if version and version.group(1) != "TORCH":
        sys.exit(name + ": torch " + version.group(1) + " is installed and TORCH is needed; `pip install torch==TORCH` brings it")
    os.execv(os.path.join(here, "bin", name), [name] + sys.argv[1:])


def train():
    _start("mcl-train")


def evaluate():
    _start("mcl-eval")
'''.replace("TORCH", TORCH)


def fail(message):
    sys.exit(f"wheel: {message}")


class Program:
    """An ELF file of 64 bits, of which names in the dynamic section are read and changed in place."""

    def __init__(self, path):
        self.data = bytearray(open(path, "rb").read())
        if self.data[:6] != b"\x7fELF\x02\x01":
            fail(f"{path} is no Linux program of 64 bits")
        (table,), (size, count) = struct.unpack_from("<Q", self.data, 0x28), struct.unpack_from("<HH", self.data, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + i * size) for i in range(count)]
        dynamic = next((s for s in sections if s[1] == SHT_DYNAMIC), None) or fail(f"{path} links nothing")
        self.strings, self.strings_size = sections[dynamic[6]][4], sections[dynamic[6]][5]
        self.entries = [struct.unpack_from("<qQ", self.data, dynamic[4] + i) for i in range(0, dynamic[5], 16)]

    def name(self, offset):
        start = self.strings + offset
        return bytes(self.data[start:self.data.index(0, start)])

    def needed(self):
        return [self.name(value).decode() for tag, value in self.entries if tag == DT_NEEDED]

    def set_runpath(self, runpath):
        """The new path takes the place of the old one, which is longer: a path to a libtorch of the build."""
        found = [value for tag, value in self.entries if tag in (DT_RPATH, DT_RUNPATH)]
        if len(found) != 1 or len(self.name(found[0])) < len(runpath):
            fail(f"the library path of the build ({[self.name(v).decode() for v in found]}) has no room for {runpath.decode()}; build with libtorch in a folder with a longer name")
        start, old = self.strings + found[0], self.name(found[0])
        self.data[start:start + len(old)] = runpath.ljust(len(old), b"\0")

    def forget(self, path, instead):
        """Paths of this machine in messages of panics become as many letters of something else."""
        path = path.rstrip("/").encode()
        self.data = self.data.replace(path + b"/", (instead.encode() + b"/" * len(path))[:len(path) + 1])
        return path

    def glibc(self):
        names = bytes(self.data[self.strings:self.strings + self.strings_size])
        return max((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", names))


def machine_paths(folder, top):
    """What must not stay: the longest first, since one may lie in another."""
    home = os.path.expanduser("~")
    paths = {top: ".", os.path.realpath(top): ".", folder: ".", os.path.realpath(folder): ".", home: "~"}
    paths[os.environ.get("CARGO_HOME") or os.path.join(home, ".cargo")] = "~"
    for name in ["LIBTORCH", "MCL_CACHE", "XDG_CACHE_HOME"]:
        if os.environ.get(name):
            paths[os.environ[name]] = "~"
    return sorted(((path, instead) for path, instead in paths.items() if len(path) > 1), key=lambda entry: -len(entry[0]))


def ready(source, folder, top):
    """A program as it is shipped."""
    with tempfile.TemporaryDirectory() as work:
        copy = os.path.join(work, "program")
        shutil.copy(source, copy)
        if shutil.which("strip"):
            subprocess.run(["strip", copy], check=True)
        program = Program(copy)
    cuda = [name for name in program.needed() if "cuda" in name]
    if cuda:
        fail(f"{source} needs {', '.join(cuda)} wherever it runs; build with TORCH=cpu: CUDA is found when the program starts")
    program.set_runpath(RUNPATH)
    paths = [program.forget(path, instead) for path, instead in machine_paths(folder, top)]
    left = [path.decode() for path in paths if path + b"/" in program.data]
    if left:
        fail(f"{source} still holds {', '.join(left)}")
    return program


def digest(data):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--bin", required=True, help="the folder of the built programs")
    options.add_argument("--out", default="dist", help="where the wheel goes")
    args = options.parse_args()
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    read = lambda name: open(os.path.join(top, name), encoding="utf-8").read()
    manifest = read("Cargo.toml")
    version, about = (re.search(rf'^{key} = "(.*)"$', manifest, re.M).group(1) for key in ["version", "description"])

    programs = {name: ready(os.path.join(args.bin, name), os.path.abspath(args.bin), top) for name in PROGRAMS}
    major, minor = max(program.glibc() for program in programs.values())
    tag = f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"
    info = f"mcl-{version}.dist-info"
    files = {
        "mcl/__init__.py": STARTER.encode(),
        **{f"mcl/bin/{name}": bytes(program.data) for name, program in programs.items()},
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: mcl\nVersion: {version}\nSummary: {about}\nLicense: MIT OR Apache-2.0\n"
            f"Requires-Python: >=3.10\nRequires-Dist: torch=={TORCH}\nDescription-Content-Type: text/markdown\n\n{read('README.md')}"
        ).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: .cargo/wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\nmcl-train = mcl:train\nmcl-eval = mcl:evaluate\n",
        f"{info}/LICENSE-MIT": read("LICENSE-MIT").encode(),
        f"{info}/LICENSE-APACHE": read("LICENSE-APACHE").encode(),
    }
    listed = [f"{name},{digest(data)},{len(data)}" for name, data in files.items()] + [f"{info}/RECORD,,"]
    files[f"{info}/RECORD"] = "\n".join(listed + [""]).encode()

    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, f"mcl-{version}-{tag}.whl")
    with zipfile.ZipFile(path + ".tmp", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same programs give the same wheel
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.startswith("mcl/bin/") else 0o100644) << 16
            archive.writestr(entry, data)
    os.replace(path + ".tmp", path)
    print(f"{path} ({os.path.getsize(path) / 1e6:.1f} MB): pip install {path}")


main()
