"""The listing of what a pattern of addresses matches: made once, and made again if it is damaged."""

from __future__ import annotations

import pytest

from hfgolf.data.downloads import list_urls


@pytest.mark.parametrize("damage", [b"", b"[", b"{}", b"[]", b"[3]", b"null", b"\xff", b"[" * 9_000])
def test_a_damaged_listing_is_made_again(tmp_path, damage):
    (tmp_path / "texts").mkdir()
    for name in ("b.txt", "a.txt"):
        (tmp_path / "texts" / name).write_text(name)
    pattern, copies = f"file://{tmp_path}/texts/*.txt", tmp_path / "copies"
    found = list_urls(pattern, "data.files", copies)
    assert [url.rpartition("/")[2] for url in found] == ["a.txt", "b.txt"]
    (listing,) = copies.rglob("listing.json")
    listing.write_bytes(damage)
    assert list_urls(pattern, "data.files", copies) == found
    (tmp_path / "texts" / "c.txt").write_text("later")
    assert list_urls(pattern, "data.files", copies) == found, "a listing that is whole stays"
