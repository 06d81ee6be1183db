"""Tests of Triton's kernels: on the GPU where there is one, else interpreted on the CPU.

Triton decides at its import whether it interprets, for the whole process. So on a CPU the tests of a file run in a
process of their own: one test of it starts pytest on the file again with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = torch.cuda.is_available() or INTERPRETED  # whether kernels can run in this process
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def run_interpreted(file: str) -> None:
    """Runs the tests of a file in a process in which Triton interprets; at least one has to pass, and none to fail."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:nbval"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(Path(file).resolve())],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(file).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
