"""No value of a foreign Parquet file is unpickled, however its columns are nested, with and without Ray Data here."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.feature_store import cached_rows
from pipelines.parquet_files import PICKLED, open_parquet
from tests.bad_files import Bomb


def marked(name: str) -> pa.Field:
    return pa.field(name, pa.large_binary(), metadata={"ARROW:extension:name": PICKLED, "ARROW:extension:metadata": ""})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (marked("sample_id"), lambda bomb: bomb),
        (pa.field("sample_id", pa.list_(marked("item"))), lambda bomb: [bomb]),
        (pa.field("sample_id", pa.struct([marked("inner")])), lambda bomb: {"inner": bomb}),
    ],
    ids=["column", "list", "struct"],
)
@pytest.mark.parametrize("ray_data_is_here", [False, True])
def test_pickled_columns_are_refused_unread(tmp_path, monkeypatch, field, value, ray_data_is_here):
    if ray_data_is_here:
        import ray.data  # noqa: F401  # registers the type
    path, ran = tmp_path / "rows.parquet", tmp_path / "ran"
    rows = pa.table([pa.array([value(pickle.dumps(Bomb(ran)))], field.type)], schema=pa.schema([field]))
    pq.write_table(rows, path)
    for read in (lambda: open_parquet(path), lambda: cached_rows(tmp_path)):
        with pytest.raises(ValueError, match=r"rows\.parquet: column sample_id holds pickled objects"):
            read()
    assert not ran.exists()


def test_plain_columns_and_those_of_other_extensions_are_read(tmp_path):
    rows = pa.table({"a": [1, 2], "b": pa.array([b"x" * 16] * 2, pa.uuid())})
    pq.write_table(rows, tmp_path / "rows.parquet")
    assert open_parquet(tmp_path / "rows.parquet").read().num_rows == 2
