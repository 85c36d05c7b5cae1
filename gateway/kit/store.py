"""Blobs: uploaded files, outputs, adapters. A local folder or S3-compatible, by URL (obstore)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlparse

from obstore.store import LocalStore, ObjectStore, from_url


def open_store(url: str) -> ObjectStore:
    """`file:///dir` (made when missing) or any URL that obstore knows, such as `s3://bucket`."""
    if url.startswith("file://"):
        path = Path(urlparse(url).path)
        path.mkdir(parents=True, exist_ok=True)
        return LocalStore(path)
    return from_url(url)
