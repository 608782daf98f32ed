#!/usr/bin/env python3
"""Compiles and links the C++ part for machines that the tests do not run on: macOS and Linux on arm64.

    tools/macos_link.py                      both targets, with the pinned mlx-c
    tools/macos_link.py --target macos       one of them: macos or linux
    tools/macos_link.py --mlx-c DIR          a checkout of another mlx-c, 0.4.1 for example

For each target it downloads the pinned wheel of MLX, compiles mlx-c and `mlx-sys/shim` against the
wheel's headers and links them with the wheel's libmlx. Then it checks that

- every function that the Rust bindings declare is defined,
- libmlx exports every symbol that is needed of it,
- on macOS: libmlx is found through a relative search path, mlx.metallib lies beside it, and both
  need macOS 14, as the README says.

It needs what a build needs, and nothing of Apple: the compiler is the Python package `ziglang`, which
has the interfaces of macOS's own libraries. For Linux it compiles against the C++ library of this
machine's compiler, because that is the one that libmlx uses there. Everything is kept below
`target/macos_link`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "target/macos_link"
SHIM = ROOT / "mlx-sys/shim"

# The compiler, and a reader of object files.
TOOLS = ["ziglang==0.15.2", "lief==0.17.6"]

TARGETS = {
    "macos": ("aarch64-macos", "mlx-metal", "aarch64-macos.14.0", "libmlx.dylib"),
    "linux": ("aarch64-linux", "mlx-cpu", "aarch64-linux-gnu.2.35", "libmlx.so"),
}

# Seconds for one call of the compiler. The first call for a target compiles libc++, too: a minute.
COMPILER_LIMIT = 900


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, **options)


def output(*command, **options):
    return run(*command, stdout=subprocess.PIPE, text=True, **options).stdout


def own_python():
    """Restarts this script in an environment that has the tools."""
    env = WORK / "venv"
    python = env / "bin/python"
    mark = env / "tools.txt"
    if not mark.is_file() or mark.read_text() != "\n".join(TOOLS):
        shutil.rmtree(env, ignore_errors=True)
        run(sys.executable, "-m", "venv", env)
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS)
        mark.write_text("\n".join(TOOLS))
    os.execv(python, [str(python), str(Path(__file__).resolve()), *sys.argv[1:]])


def mlx_c(minor):
    """The directory of a pinned mlx-c, which Cargo fetches and verifies as for a build."""
    pins = json.loads((ROOT / "vendor/pins.json").read_text())["mlx_c"][minor]
    project = WORK / f"mlx-c-source-{minor}"
    project.mkdir(parents=True, exist_ok=True)
    (project / "lib.rs").write_text("")
    for pinned, name in [("manifest.toml", "Cargo.toml"), ("lock.toml", "Cargo.lock")]:
        shutil.copyfile(ROOT / "vendor/mlx-c" / minor / pinned, project / name)
    text = output(
        "cargo", "metadata", "--locked", "--format-version", "1",
        "--manifest-path", project / "Cargo.toml",
    )  # fmt: skip
    packages = json.loads(text)["packages"]
    package = next(p for p in packages if p["name"] == pins["crate"])
    return Path(package["manifest_path"]).parent / pins["directory"]


def version_of(source):
    """The version of mlx-c, as its CMakeLists.txt sets it."""
    text = (source / "CMakeLists.txt").read_text()
    return re.search(r"set\(MLX_C_VERSION\s+([0-9.]+)\)", text).group(1)


def wheel(package, version, target):
    """The directory of the unpacked wheel of MLX."""
    pins = json.loads((ROOT / "vendor/pins.json").read_text())["wheels"]
    wanted = (package, version, target)
    pin = next(p for p in pins if (p["package"], p["version"], p["target"]) == wanted)
    done = WORK / f"{package}-{version}-{target}"
    if not done.is_dir():
        partial = done.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        line = f"{package}=={version} --hash=sha256:{pin['sha256']}\n"
        (partial / "requirements.txt").write_text(line)
        run(
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--disable-pip-version-check", "--only-binary=:all:", "--require-hashes",
            "--platform", pin["platform"], "--python-version", "3.12",
            "-d", "download", "-r", "requirements.txt",
            cwd=partial,
        )  # fmt: skip
        (file,) = (partial / "download").glob("*.whl")
        run(sys.executable, "-m", "zipfile", "-e", file, partial)
        shutil.rmtree(partial / "download")
        partial.rename(done)
    return done / "mlx"


def compiler_headers():
    """The directories of the C++ library's headers of this machine's compiler."""
    command = [os.environ.get("CXX", "c++"), "-E", "-x", "c++", "-v", os.devnull]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    listed = text.split("#include <...> search starts here:")[1].split("End of search list")[0]
    libraries = [line.strip() for line in listed.splitlines() if "/c++" in line]
    if not libraries:
        sys.exit("error: the compiler of this machine has no libstdc++, which MLX on Linux uses")
    return libraries


def compile_and_link(name, source, mlx, out):
    """The shared library of mlx-c and the shim for a target."""
    _, _, triple, _ = TARGETS[name]
    # Calls at the same time can wait for each other's locks forever where they share a cache:
    # https://github.com/ziglang/zig/issues/22453.
    cache = str(WORK / f"cache-{name}")
    own_cache = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    limited = {"env": {**os.environ, **own_cache}, "timeout": COMPILER_LIMIT}
    zig = [sys.executable, "-m", "ziglang"]
    compiler = [*zig, "c++", "-target", triple]
    flags = ["-std=c++20", "-O0", "-g0", "-w", "-fPIC"]
    include = [f"-I{source}", f"-I{SHIM}", f"-I{mlx / 'include'}"]
    link = ["-Wl,-rpath,@loader_path/lib"]
    if name == "linux":
        # Without a C++ library of its own.
        compiler = [*zig, "cc", "-target", triple]
        flags += ["-x", "c++", *(f"-I{d}" for d in compiler_headers())]
        # libmlx brings the C++ library. What is missing of libmlx itself is found below.
        link = ["-Wl,--allow-shlib-undefined", "-Wl,-z,undefs"]
    # mlx-c in one piece: the headers of MLX take most of the time.
    mlxc = out / "mlxc.cpp"
    files = sorted((source / "mlx/c").glob("*.cpp"))
    mlxc.write_text("".join(f'#include "{file}"\n' for file in files))
    units = [(mlxc, ["-include", SHIM / "error_format.h"])]
    # Files of the shim have functions of one name, so each is compiled alone, as in a build.
    units += [(file, []) for file in sorted(SHIM.glob("*.cpp"))]
    objects = []
    for unit, more in units:
        made = out / f"{unit.stem}.o"
        run(*compiler, *flags, *include, *more, "-c", unit, "-o", made, **limited)
        objects.append(made)
    library = out / ("librust_mlx_c" + Path(TARGETS[name][3]).suffix)
    run(*compiler, "-shared", "-o", library, *objects, f"-L{mlx / 'lib'}", "-lmlx", *link, **limited)
    return library


def declared(source):
    """The functions of C that the bindings call, as far as this mlx-c declares them, and how many
    it does not: a checkout may be of another patch version than the committed bindings."""
    minor = ".".join(version_of(source).split(".")[:2])
    bindings = (ROOT / f"mlx-sys/src/bindings/{minor}.rs").read_text()
    shim = (ROOT / "mlx-sys/src/shim.rs").read_text()
    names = set(re.findall(r"pub fn (mlx_\w+)", bindings))
    headers = "".join(p.read_text() for p in sorted((source / "mlx/c").rglob("*.h")))
    of_this = {n for n in names if re.search(rf"\b{n}\(", headers)}
    of_shim = set(re.findall(r"pub fn (rust_mlx_\w+)", shim))
    if not of_this or not of_shim:
        sys.exit("error: the bindings declare no functions; did their form change?")
    return of_this | of_shim, len(names) - len(of_this)


def symbols(binary):
    """Names that a library defines for others, and names that it needs of others."""
    import lief

    if isinstance(binary, lief.MachO.Binary):
        # Symbols of C have an underscore there.
        names = lambda them: {str(s.name).removeprefix("_") for s in them}
        return names(binary.exported_symbols), names(binary.imported_symbols)
    names = lambda them: {str(s.name) for s in them}
    return names(binary.exported_symbols), names(binary.imported_symbols)


def check_macos(library, libmlx, mlx):
    """What only macOS has: search paths, the file of GPU kernels, the oldest system."""
    problems = []
    needed = [str(l.name) for l in library.libraries]
    if "@rpath/libmlx.dylib" not in needed:
        problems.append(f"libmlx is not found through a search path: {', '.join(needed)}")
    if not (mlx / "lib/mlx.metallib").is_file():
        problems.append("mlx.metallib does not lie beside libmlx.dylib, where MLX looks for it")
    for what, binary in [("our library", library), ("libmlx", libmlx)]:
        oldest = binary.build_version.minos[:2]
        if list(oldest) != [14, 0]:
            problems.append(f"{what} needs macOS {oldest}, and the README says 14")
    return problems


def check(name, source):
    """Problems of a target; an empty list where there are none."""
    import lief

    target, package, triple, file = TARGETS[name]
    version = version_of(source)
    pairs = json.loads((ROOT / "vendor/pins.json").read_text())["mlx_for_mlx_c"]
    mlx_version = pairs[".".join(version.split(".")[:2])]
    mlx = wheel(package, mlx_version, target)
    out = WORK / f"{name}-{version}"
    out.mkdir(parents=True, exist_ok=True)
    library = lief.parse(str(compile_and_link(name, source, mlx, out)))
    libmlx = lief.parse(str(mlx / "lib" / file))
    defined, needed = symbols(library)
    offered, _ = symbols(libmlx)
    functions, newer = declared(source)
    problems = [f"{n} is declared in Rust and defined nowhere" for n in sorted(functions - defined)]
    # Names of MLX's own namespace, mangled.
    of_mlx = {n for n in needed - defined if "N3mlx4core" in n or "NK3mlx4core" in n}
    problems += [f"libmlx exports no {n}" for n in sorted(of_mlx - offered)]
    if name == "macos":
        problems += check_macos(library, libmlx, mlx)
    print(
        f"{triple}: mlx-c {version} with MLX {mlx_version}: {len(functions)} functions defined"
        + (f" ({newer} of the bindings are of a newer mlx-c)" if newer else "")
        + f", {len(of_mlx)} symbols needed of libmlx, which exports {len(offered)}"
    )
    return [f"{triple}: {p}" for p in problems]


def main():
    parser = argparse.ArgumentParser(description="Link for macOS and Linux on arm64.")
    parser.add_argument("--target", choices=sorted(TARGETS), help="one of them")
    parser.add_argument("--mlx-c", type=Path, metavar="DIR", help="a checkout of mlx-c instead of the pinned ones")
    args = parser.parse_args()
    if Path(sys.prefix) != WORK / "venv":
        own_python()
    pinned = json.loads((ROOT / "vendor/pins.json").read_text())["mlx_c"]
    sources = [args.mlx_c] if args.mlx_c else [mlx_c(minor) for minor in pinned]
    names = [args.target] if args.target else TARGETS
    # A compilation uses one core, and a gigabyte of memory. The calls for one target follow each
    # other, since they share the target's cache and perhaps its wheel.
    of_target = lambda name: [p for s in sources for p in check(name, s.resolve())]
    with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
        problems = [p for found in pool.map(of_target, names) for p in found]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
