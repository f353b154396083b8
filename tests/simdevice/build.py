"""Builds the simulated device, once per source and version of torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

NAME = "simulated_device"
SOURCES = sorted(Path(__file__).with_name("csrc").iterdir())
FLAGS = ["-O1", "-g0", "-Wno-interference-size", "-Wno-stringop-overflow", "-DAT_PER_OPERATOR_HEADERS"]


def search_path() -> str:
    """Where to look for programs: pip puts ninja next to the interpreter."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing_tools() -> list[str]:
    """The programs that the build needs and this machine lacks."""
    return [tool for tool in ("g++", "ninja") if shutil.which(tool, path=search_path()) is None]


def library() -> Path:
    """The shared object, built if it is not there yet."""
    key = hashlib.sha256((torch.__version__ + sys.version).encode() + " ".join(FLAGS).encode())
    for source in SOURCES:
        key.update(source.read_bytes())
    cache = Path(os.environ.get("SIMDEVICE_CACHE", Path(tempfile.gettempdir()) / "simdevice"))
    folder = cache / key.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may start at once
        built = folder / "built"
        if not built.exists():
            # In a process of its own, since torch loads what it builds.
            command = [sys.executable, __file__, str(folder)]
            result = subprocess.run(command, env={**os.environ, "PATH": search_path()}, capture_output=True, text=True)
            if result.returncode != 0:
                raise RuntimeError(f"the simulated device does not build:\n{result.stdout}\n{result.stderr}")
            built.touch()
    return folder / f"{NAME}.so"


def main(folder: str) -> None:
    from torch.utils import cpp_extension

    sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    cpp_extension.load(NAME, sources, build_directory=folder, extra_cflags=FLAGS, verbose=True, is_python_module=False)


if __name__ == "__main__":
    main(sys.argv[1])
