"""What the tasks do that write and read a saved stage's files over Spark Connect."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from sparkdl.ml.estimators.storage_task import _copy, _read, _remove, _Write


def test_files_are_written_in_pieces_copied_read_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    url = f"file:{folder}"  # as Hadoop writes it
    batches = [
        pa.record_batch({"offset": [0, 3], "content": [b"one", b"two"]}),
        pa.record_batch({"offset": [6], "content": [b""]}),
    ]
    assert list(_Write(f"{url}/mine/file")(batches)) == []
    assert (folder / "mine" / "file").read_bytes() == b"onetwo"
    (folder / "mine" / "deep").mkdir()
    (folder / "mine" / "deep" / "inner").write_bytes(b"in")
    assert list(_copy(f"{folder}/mine", f"{url}/copied", [])) == []
    assert (folder / "copied" / "deep" / "inner").read_bytes() == b"in"
    assert list(_copy(f"{folder}/mine/file", f"{url}/alone/file", [])) == []
    assert (folder / "alone" / "file").read_bytes() == b"onetwo"
    pieces = [batch.column(0).to_pylist() for batch in _read(f"{folder}/copied/file", [])]
    assert pieces == [[b""], [b"onetwo"]]
    assert list(_read(f"{folder}/no", [])) == [], "is not an empty file"
    for _ in range(2):  # the second time there is nothing
        assert list(_remove(url, [])) == []
    assert not folder.exists()
