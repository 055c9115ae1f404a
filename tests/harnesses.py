"""Programs of tests/native, compiled from csrc with g++ and its sanitizers, or from a mutant of it.

A mutant is a copy of the sources with one thing changed, which a test has to notice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.programs import capture

SOURCES = Path(__file__).parents[1] / "csrc"
NATIVE = Path(__file__).parent / "native"
THREADS = ("-fsanitize=thread",)
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
DEVICE = ("-DMP_EMULATED",)
RACE = "WARNING: ThreadSanitizer: data race"


def run(program: Path, *words: str | int, timeout: float = 100) -> tuple[int, str]:
    """The exit status of a program, and all that it printed."""
    done = capture(
        [str(program), *map(str, words)],
        timeout=timeout,
        # The first race is enough, and finding the lines of hundreds takes a minute.
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    return done.returncode, done.stdout + done.stderr


class Builds:
    """Harnesses by flags, each compiled once; of a mutant only what has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arithmetic: dict[tuple[str, ...], Path] = {}
        self._programs: dict[tuple[str, tuple[str, ...]], Path] = {}

    def program(self, harness: str, flags: tuple[str, ...]) -> Path:
        """``tests/native/<harness>.cpp`` over the sources as they are."""
        key = (harness, flags)
        if key not in self._programs:
            self._programs[key] = self.harness(harness, flags)
        return self._programs[key]

    def harness(self, harness: str, flags: tuple[str, ...], sources: Path = SOURCES) -> Path:
        """The same over other sources."""
        number = len(list(self.folder.iterdir()))
        arithmetic = self._arithmetic.get(flags)
        if arithmetic is None or _arithmetic(sources) != _arithmetic(SOURCES):
            arithmetic = self.folder / f"cpu{number}.o"
            _compile(sources / "cpu.cpp", sources, flags, arithmetic)
            if sources == SOURCES:
                self._arithmetic[flags] = arithmetic
        compiled = self.folder / f"harness{number}.o"
        _compile(NATIVE / f"{harness}.cpp", sources, flags, compiled)
        program = self.folder / f"program{number}"
        link = ["g++", *flags, "-pthread", str(compiled), str(arithmetic), "-o", str(program)]
        subprocess.run(link, check=True, timeout=300)
        return program

    def mutant(self, file: str, old: str, new: str) -> Path:
        """The sources with ``new`` in place of ``old``."""
        sources = self.folder / f"sources{len(list(self.folder.iterdir()))}"
        shutil.copytree(SOURCES, sources)
        text = (sources / file).read_text()
        assert old in text, f"{file} has no {old!r} to change"
        (sources / file).write_text(text.replace(old, new))
        return sources


def _arithmetic(sources: Path) -> str:
    return (sources / "cpu.cpp").read_text() + (sources / "dtype.h").read_text()


def _compile(source: Path, headers: Path, flags: tuple[str, ...], to: Path) -> None:
    command = ["g++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror"]
    command += ["-ffp-contract=off", *flags, f"-I{headers}", f"-I{NATIVE}"]
    command += ["-c", str(source), "-o", str(to)]
    done = capture(command)
    assert done.returncode == 0, done.stderr
