"""A file is the old one or the new one, and what was begun and failed is gone."""

import errno
import fcntl
import subprocess
import sys

import pytest

from domino_core.atomic_files import sole_writer, whole, write_atomically


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "folder" / "file"
    write_atomically(path, b"old")

    def fill() -> None:
        with whole(path) as made:
            made.write_bytes(b"new, ha")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fill()
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_each_writer_has_a_place_of_its_own(tmp_path):
    path = tmp_path / "file"
    with whole(path) as first, whole(path) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
        assert not path.exists()
    assert path.read_bytes() == b"first"  # which was done last
    assert list(tmp_path.iterdir()) == [path]


HOLDER = """
import sys, time
from pathlib import Path
from domino_core.atomic_files import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("writing", flush=True)
    time.sleep(60)
"""


def test_one_process_writes_a_file_and_one_that_was_killed_does_not(tmp_path):
    path = tmp_path / "file"
    other = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "writing\n"
    with pytest.raises(ValueError, match="file is being written by another run"), sole_writer(path):
        pass
    with sole_writer(tmp_path / "another"):
        pass
    other.kill()
    other.wait()
    with sole_writer(path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_its_owner_has_just_removed_is_nobodys(tmp_path, monkeypatch):
    """Else a third process would make a new one, and both of them write."""
    flock = fcntl.flock

    def taken_late(file, operation: int) -> None:
        (tmp_path / ".file.lock").unlink()  # as its owner does at its end, between our opening and our locking
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", taken_late)
    with pytest.raises(ValueError, match="another run"), sole_writer(tmp_path / "file"):
        pass
