"""A file is the old one or the new one, and what was begun and failed is gone."""

import errno

import pytest

from domino_core.atomic_files import whole, write_atomically


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
