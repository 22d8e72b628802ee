"""Processes that are ended in every way that can be caught."""

import signal
import subprocess
import sys

import pytest

from jobs.interrupts import as_interrupts

PROGRAM = """
import signal, sys, time
from jobs.interrupts import as_interrupts
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    with as_interrupts():
        print("begun", flush=True)
        time.sleep(60)
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_started_is_ended(number):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, ""], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.communicate(timeout=30)[0] == "cleaned up\n"


def test_a_terminal_that_does_not_matter_is_no_end():
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "nohup"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert process.communicate(timeout=30)[0] == "cleaned up\n"


def test_afterwards_signals_are_what_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with as_interrupts():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
