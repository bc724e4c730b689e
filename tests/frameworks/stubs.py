"""Stand-ins for the CUDA libraries that PyPI's torch links.

PyPI's torch wheel is built for CUDA and refuses to load where CUDA's libraries are absent. Nothing
here needs a GPU, only torch's Python classes, so each missing library is made as an empty shared
object whose functions all fail. Usage: stubs.py SITE_PACKAGES/torch/lib OUTPUT_FOLDER
"""

import pathlib
import re
import subprocess
import sys
from collections import defaultdict

LIBRARY = re.compile(r"lib(cu|nv|nccl)")
# Which undefined symbols without a version belong to which library.
OWNER = {
    "libcublasLt": r"cublasLt",
    "libcublas": r"cublas(?!Lt)",
    "libcudart": r"cuda",
    "libcudnn": r"cudnn",
    "libcufft": r"cufft",
    "libcurand": r"curand",
    "libcusparseLt": r"cusparseLt",
    "libcusparse": r"cusparse(?!Lt)",
    "libcusolver": r"cusolver",
    "libcufile": r"cuFile",
    "libcupti": r"cupti",
    "libcuda": r"cu(?!File)[A-Z]",
    "libnccl": r"p?nccl",
    "libnvrtc": r"nvrtc",
    "libnvshmem": r"nvshmem",
    "libnvJitLink": r"nvJitLink",
    "libnvToolsExt": r"nvtx",
}


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def inspect(libraries):
    """Libraries that are missing, and the symbols wanted of each, by version."""
    present = {path.name for path in libraries}
    missing, wanted, unversioned = set(), defaultdict(lambda: defaultdict(set)), set()
    for path in libraries:
        needed = re.findall(r"NEEDED.*\[(.+?)\]", output("readelf", "-dW", str(path)))
        missing |= {name for name in needed if name not in present and LIBRARY.match(name)}
        library_of, library = {}, None
        for line in output("readelf", "-VW", str(path)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found.group(1)
            if (found := re.search(r"Name: (\S+)", line)) and library:
                library_of[found.group(1)] = library
        names = output("nm", "-D", "--undefined-only", "--with-symbol-versions", str(path))
        for line in names.splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if kind in "wv":
                continue
            if version in library_of:
                wanted[library_of[version]][version].add(name)
            elif not version:
                unversioned.add(name)
    return missing, wanted, unversioned


def owner(library):
    stem = library.split(".so")[0]
    keys = [key for key in OWNER if stem.startswith(key)]
    return OWNER[max(keys, key=len)] if keys else None


def failing(name):
    """A function that fails, or the text of its failure."""
    if re.search(r"Get(ErrorString|ErrorName|StatusString)$", name):
        return f'const char *{name}(void) {{ return "no CUDA here"; }}\n'
    return f"int {name}(void) {{ return 999; }}\n"


def build(library, versions, folder):
    source = "".join(
        failing(name)
        for names in versions.values()
        for name in sorted(names)
    )
    (folder / "stub.c").write_text(source or "int stub;\n")
    command = ["cc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{library}"]
    script = "".join(
        f"{version} {{ global: {'; '.join(sorted(names))}; }};\n"
        for version, names in versions.items()
        if version
    )
    if script:
        (folder / "versions.map").write_text(script)
        command.append(f"-Wl,--version-script={folder / 'versions.map'}")
    command += ["-o", str(folder / library), str(folder / "stub.c")]
    subprocess.run(command, check=True)


def main():
    source, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    missing, wanted, unversioned = inspect(sorted(source.glob("*.so*")))
    taken = {name for versions in wanted.values() for names in versions.values() for name in names}
    for library in sorted(missing):
        versions = {version: set(names) for version, names in wanted[library].items()}
        if pattern := owner(library):
            names = {n for n in unversioned if re.match(pattern, n) and n not in taken}
            if names:
                versions.setdefault("", set()).update(names)
                taken |= names
        build(library, versions, folder)


if __name__ == "__main__":
    main()
