"""Files of object stores: ``s3://bucket/key``, ``gs://…``, and any other URL that fsspec opens.

pyarrow's file systems open the schemes they know, fsspec's the others. Keys and address of a store
come from the places its own tools read (``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE``,
``AWS_ENDPOINT_URL``, a service account). A URL may end in parameters of pyarrow:
``s3://bucket/key?endpoint_override=localhost:9000&scheme=http``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastlstm.errors import DataError, StorageError
from fastlstm.system import storage
from fastlstm.system.redaction import redacted

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_EXTRAS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}
"""Packages for fsspec to open a scheme that a build of pyarrow lacks."""


def is_url(source: object) -> bool:
    """Returns whether a source is a URL; ``C:/a.csv`` and ``a.csv`` are paths."""
    return isinstance(source, str) and _URL.match(source) is not None


@dataclass(frozen=True)
class RemoteFile:
    """A file at `path` in `store`, a file system of pyarrow; `url` is its address, or its
    directory's as given."""

    url: str
    path: str
    store: Any

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot, or an empty text."""
        return re.search(r"(\.[^.]*)?$", self.name)[0]  # type: ignore[index]

    def open(self) -> Any:
        """Opens it for random reads. Raises OSError, also if it is missing."""
        return self.store.open_input_file(self.path)

    def signature(self) -> list[str | int]:
        """Returns URL, size, time and version, which identify its content; DataError if missing."""
        info = _info(self.store, self.path, self.url)
        if not info.is_file:
            raise DataError(f"there is no file {self.url}")
        return [self.url, info.size, info.mtime_ns or 0, _version(self.store, self.path)]


def open_store(url: str) -> tuple[Any, str]:
    """Returns pyarrow's file system of a URL, and the path in it. Raises DataError: no installed
    package opens the URL, or the URL holds keys."""
    if redacted(url) != url:
        raise DataError(
            "the URL holds keys, which would be stored with the run; leave them out and set"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of the store's tools"
        )
    base, has_parameters, parameters = url.partition("?")
    scheme, _, rest = base.partition("://")
    place, _, key = rest.partition("/")
    store, path = _store(f"{scheme}://{place}/", has_parameters + parameters)
    return store, f"{path.rstrip('/')}/{key}"


@lru_cache(maxsize=64)
def _store(root: str, parameters: str) -> tuple[Any, str]:
    import pyarrow as pa
    from pyarrow import fs

    scheme = root.partition(":")[0]
    try:
        store, path = fs.FileSystem.from_uri(root + parameters)
        return store, path
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ImportError) as error:
        if isinstance(error, pa.ArrowInvalid) and "Unrecognized" not in str(error):
            raise DataError(f"{root} is not the URL of a store ({error})") from error
    except OSError as error:
        raise store_error(root, "read", error) from error
    try:
        import fsspec

        opened, path = fsspec.core.url_to_fs(root)
    except (ImportError, ValueError) as error:
        package = _EXTRAS.get(scheme)
        cure = f"pip install {package}" if package else "use s3://, gs:// or a local path"
        raise DataError(f"{scheme}:// cannot be opened ({error}); {cure}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(opened)), path


@contextmanager
def store_errors(url: str, doing: str) -> Iterator[None]:
    """Turns an error of a store inside the block into a DataError or StorageError."""
    try:
        yield
    except OSError as error:
        raise store_error(url, doing, error) from error


def store_error(url: str, doing: str, error: Exception) -> DataError | StorageError:
    """Returns the error for a store's refusal, with the key or setting that is missing."""
    text = " ".join(str(error).split())
    if any(word in text for word in ("NO_SUCH_BUCKET", "NoSuchBucket")):
        advice = "there is no such bucket; check its name and the region"
    elif any(word in text for word in ("NO_SUCH_KEY", "NoSuchKey", "not found", "No such file")):
        advice = "there is no such file"
    elif any(word in text for word in ("ACCESS_DENIED", "Forbidden", "credentials", "403", "401")):
        advice = "the store refused the keys, or found none; set AWS_ACCESS_KEY_ID and"
        advice += " AWS_SECRET_ACCESS_KEY, or what the store's own tools use"
    else:
        advice = "check the address, the keys and the network"
    kind = DataError if doing == "read" else StorageError
    return kind(f"{url}: cannot {doing} ({text[:300]}): {advice}")


def remote_files(url: str, suffixes: tuple[str, ...]) -> list[RemoteFile]:
    """Returns the files of a URL: one file, all below a directory, or all that match a pattern
    (``*`` matches within a directory, ``**`` across), with names that end in `suffixes`. Raises
    DataError: there is no file, or the store refused."""
    from pyarrow import fs

    store, path = open_store(url)
    base = path.split("*")[0].rpartition("/")[0] if "*" in path else path.rstrip("/")
    info = _info(store, base, url)
    if info.is_file and base == path:
        return [RemoteFile(url, path, store)]
    if info.type != fs.FileType.Directory:
        bucket = path.strip("/").partition("/")[0]
        is_there = _info(store, bucket, url).type != fs.FileType.NotFound
        why = "" if is_there else f": the store has no {bucket}"
        raise DataError(f"there is no file {url}{why}")
    with store_errors(url, "read"):
        found = store.get_file_info(fs.FileSelector(base, recursive=True))
    wanted = re.compile(_pattern(path) if "*" in path else ".*", re.DOTALL)
    paths = visible([f.path for f in found if f.is_file and wanted.fullmatch(f.path)], base, url)
    paths = sorted(place for place in paths if place.lower().endswith(suffixes))
    if not paths:
        raise DataError(f"{url} has no table; expected files ending in {', '.join(suffixes)}")
    return [RemoteFile(_address(url, path, place), place, store) for place in paths]


_HIDDEN = re.compile(r"(?:^|/)(?:\.|_[^/=]*/)")
_LAKE = re.compile(r"(?:^|/)(?:_delta_log/|metadata/[^/]*\.metadata\.json$)")


def visible(paths: list[str], base: str, source: str) -> list[str]:
    """Returns the paths below `base` without hidden files and directories such as "_temporary" of
    Spark. Raises DataError if they are a table of Delta or Iceberg."""
    if any(_LAKE.search(path, len(base)) for path in paths):
        raise DataError(
            f"{source} is a table of Delta or Iceberg, which keeps files of deleted rows; give what"
            f" deltalake.DeltaTable({source!r}).to_pyarrow_table(), or scan().to_arrow() of"
            " pyiceberg's table, returns, or a Parquet file of it"
        )
    return [path for path in paths if not _HIDDEN.search(path, len(base))]


def arrow_batches(source: Any) -> tuple[Any, Iterable[Any]]:
    """Returns the schema and the batches of an open Arrow IPC file, or of a stream, which Hugging
    Face's datasets write."""
    from pyarrow import ipc

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    data: Any = ipc.open_file(source) if is_file else ipc.open_stream(source)
    return data.schema, map(data.get_batch, range(data.num_record_batches)) if is_file else data


def _pattern(path: str) -> str:
    parts = re.split(r"(\*\*/?|\*)", path)
    return "".join(
        {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts
    )


def _address(url: str, path: str, place: str) -> str:
    """Returns the URL of a file at `place`, from a URL whose path is `path`."""
    base, mark, parameters = url.partition("?")
    return base.rstrip("/").removesuffix(path.rstrip("/")) + place + mark + parameters


def _info(store: Any, path: str, url: str) -> Any:
    with store_errors(url, "read"):
        return store.get_file_info(path)


def _version(store: Any, path: str) -> str:
    """Returns the ETag of a file, or what fsspec knows of it, or an empty text."""
    inner = getattr(getattr(store, "handler", None), "fs", None)
    if inner is not None:
        return str(inner.ukey(path))
    with store_errors(path, "read"), store.open_input_stream(path) as stream:
        return bytes(stream.metadata().get("ETag", b"")).decode("ascii", "replace")


def write_whole(place: str, produce: Callable[[Any], object]) -> None:
    """Writes a whole file, or nothing, at a path or a URL; `produce` writes to the open file.

    On a disk the file is written under a hidden name, synced and renamed. A store shows a file once
    all of it has arrived. Raises StorageError: the disk or the store refused.
    """
    if is_url(place):
        with store_errors(place, "write"):
            store, key = open_store(place)
            if store.type_name == "local":  # file://
                store.create_dir(key.rpartition("/")[0])
            with store.open_output_stream(key) as stream:
                produce(stream)
        return
    path = Path(os.path.expanduser(place))
    with storage.storage_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage.staged(path, Path.touch) as temporary, temporary.open("wb") as file:
            produce(file)
            file.flush()
            os.fsync(file.fileno())
