"""Processes of the experiment do not outlive the one that started them, and do not keep it from ending."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, time
from pipelines.experiment_pool import processes

def work(_):
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
    with processes(2) as pool:
        list(pool.map(work, range(2)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_what_started_them(number, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    try:
        process.communicate(timeout=20)  # until nobody has its output open
    finally:
        for pid in (process.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
