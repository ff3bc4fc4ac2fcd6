"""A process that opens files of other libraries: HDF5, torch's `.pt` and ONNX.

`python -m fastlstm.exchange.converter hdf5|torch|onnx BYTES DIRECTORY` reads a file from standard
input and writes safetensors to standard output, with everything else as JSON in the metadata. A
forged file can crash the C libraries for HDF5, torch and protobuf, or make them allocate memory
without bound; this process has a memory limit. It follows no links and unpickles tensors only;
arrays that ONNX stores beside the model are read from its directory.
"""

from __future__ import annotations

import io
import json
import math
import re
import resource
import sys
import warnings
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError

_SPARE_BYTES = 256 << 20
_SPARE_S, _BYTES_PER_S, _MAX_S = 10, 20_000_000, 300
_COPIES = {"onnx": 16}
"""Allowed memory as a multiple of the file size, default 4; int8 in ONNX becomes float32."""
_MAX_OBJECTS = 100_000
_MAX_DEPTH = 32
_SKIPPED = ("optimizer", "optimizer_weights")
_STATE_NAMES = ("state_dict", "model_state_dict", "model_state", "model", "weights")


def main() -> None:
    """Converts standard input; a refusal is one line on standard error and exit code 2."""
    kind, size = sys.argv[1], int(sys.argv[2])
    read, *libraries = _READERS[kind]
    for library in libraries:  # these libraries are large: load them before the limit
        import_module(library)
    _set_limits(size, _COPIES.get(kind, 4))
    warnings.simplefilter("ignore")
    try:
        arrays, about = read(sys.stdin.buffer.read())
        from safetensors.numpy import save

        sys.stdout.buffer.write(save(arrays, {"about": json.dumps(about)}))
        sys.stdout.buffer.flush()
    except FormatError as error:
        _refuse(str(error))
    except MemoryError:
        _refuse("it claims to hold more than the file does")
    except Exception as error:
        _refuse(f"incomplete or damaged, copy it again ({type(error).__name__}: {error})")


def _refuse(reason: str) -> None:
    sys.stderr.write(reason.splitlines()[0][:600] if reason else "damaged")
    sys.stderr.flush()
    sys.exit(2)


def _set_limits(size: int, copies: int) -> None:
    """Limits the memory to some copies of the file, and the time to what reading it takes."""
    seconds = min(_SPARE_S + size // _BYTES_PER_S, _MAX_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, _MAX_S + 1))
    status = Path("/proc/self/statm")
    used = int(status.read_text().split()[0]) * resource.getpagesize() if status.exists() else 0
    limit = (used or 4 << 30) + copies * size + _SPARE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError):
        pass  # a system without this limit


def _read_hdf5(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    import h5py

    arrays: dict[str, NDArray[Any]] = {}
    attributes: dict[str, dict[str, Any]] = {}
    total = 0
    with h5py.File(h5py.h5f.open_file_image(data), "r") as file:
        for path, item in _hdf5_items(h5py, file):
            if isinstance(item, h5py.Group):
                attributes[path] = _attributes(item, len(data))
            elif item.dtype.kind == "f":
                total += item.size * item.dtype.itemsize
                _check_dataset(item, path, total, len(data))
                arrays[path] = np.ascontiguousarray(item[()], dtype=np.float32)
    return arrays, {"attributes": attributes}


def _hdf5_items(h5py: Any, file: Any) -> Iterator[tuple[str, Any]]:
    """Yields groups and datasets with their paths; refuses links and loops."""
    seen: set[Any] = set()
    stack: list[tuple[str, Any]] = [("", file["/"])]
    while stack:
        path, item = stack.pop()
        address = h5py.h5o.get_info(item.id).addr
        if address in seen or len(seen) >= _MAX_OBJECTS or path.count("/") > _MAX_DEPTH:
            raise FormatError(f"'{path}' is linked twice, or the file has too many objects")
        seen.add(address)
        yield path, item
        if not isinstance(item, h5py.Group):
            continue
        for name in item:
            inner = f"{path}/{name}".lstrip("/")
            if name in _SKIPPED and not path:
                continue
            link = item.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise FormatError(f"'{inner}' is a link to another place or file")
            child = item[name]
            if isinstance(child, h5py.Group | h5py.Dataset):
                stack.append((inner, child))


def _check_dataset(item: Any, path: str, total: int, limit: int) -> None:
    if item.is_virtual or item.external:
        raise FormatError(f"the values of '{path}' are in another file")
    num_bytes = item.size * item.dtype.itemsize
    if item.chunks is not None:
        raise FormatError(f"'{path}' is stored in chunks or compressed, which Keras never does")
    if total > limit or item.id.get_storage_size() < num_bytes:
        raise FormatError(f"'{path}' claims {item.shape}, more than the file holds")


def _attributes(group: Any, limit: int) -> dict[str, Any]:
    values = {}
    for name in group.attrs:
        kept = group.attrs.get_id(name)
        if math.prod(kept.shape) * kept.dtype.itemsize > limit:
            raise FormatError(f"the attribute '{name}' claims more than the file holds")
        values[name] = _plain(group.attrs[name])
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return [_plain(part) for part in value.tolist()] if value.ndim == 1 else None
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, str):  # h5py gives invalid UTF-8 as surrogates
        return value.encode("utf-8", "replace").decode()
    return value if isinstance(value, int | float | bool) else None


def _read_torch(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    import torch

    _check_archive(data)
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        raise FormatError(_reason(error)) from None
    tensors = _state(torch, loaded)
    arrays, seen, total = {}, set(), 0
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if not tensor.is_meta and storage.data_ptr() not in seen:  # tied weights have one storage
            seen.add(storage.data_ptr())
            total += storage.nbytes()
        if tensor.is_meta or num_bytes > storage.nbytes() or total > len(data):
            raise FormatError(f"'{name}' claims {tuple(tensor.shape)}, more than the file holds")
        arrays[name] = tensor.detach().float().contiguous().numpy()
    return arrays, {"names": list(arrays)}


def _reason(error: Exception) -> str:
    """Returns the refused object, which torch's long message names."""
    text = str(error) or type(error).__name__
    found = re.search(r"GLOBAL ([\w.]+)", text)
    if found is not None:
        return f"it holds an object of {found[1][:80]}, which is not unpickled; {_state_lines()}"
    line = next(line.strip() for line in text.splitlines() if line.strip())
    return f"it holds more than tensors, or is damaged ({line[:200]})"


def _state_lines(load: str = "torch.load('model.pt', weights_only=False)") -> str:
    """Returns the two lines that save a module as a readable file."""
    return (
        f"if you trust it, save its state_dict: model = {load};"
        " torch.save(model.state_dict(), 'state.pt')"
    )


def _check_archive(data: bytes) -> None:
    """Refuses an archive that torch would not write; torch before 1.6 writes no archive."""
    if data.startswith(b"\x80"):
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise FormatError(f"it is no file of torch.save ({error})") from None
    if any("/code/" in file.filename for file in files):
        load = _state_lines("torch.jit.load('model.pt')")
        raise FormatError(f"it is TorchScript, which is not run here; {load}")
    packed = any(file.compress_type != zipfile.ZIP_STORED for file in files)
    if packed or sum(file.file_size for file in files) > len(data):
        raise FormatError("its parts are compressed or overlap, which torch never writes")


def _state(torch: Any, loaded: Any) -> dict[str, Any]:
    """Returns the named tensors of a state_dict, or of a checkpoint with one."""
    if isinstance(loaded, dict):
        for name in _STATE_NAMES:
            if isinstance(loaded.get(name), dict):
                loaded = loaded[name]
                break
    if not isinstance(loaded, dict):
        raise FormatError(
            f"it holds {type(loaded).__name__}, expected a state_dict; {_state_lines()}"
        )
    tensors = {
        name: value
        for name, value in loaded.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    if not tensors:
        raise FormatError("it holds no named tensors, expected a state_dict")
    return tensors


def _read_onnx(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    from fastlstm.exchange.onnx_model import read_onnx

    def allow(more: int) -> None:
        if more:
            _set_limits(len(data) + more, _COPIES["onnx"])

    return read_onnx(data, Path(sys.argv[3]), allow)


_READERS: dict[str, tuple[Any, ...]] = {
    "hdf5": (_read_hdf5, "h5py"),
    "torch": (_read_torch, "torch"),
    "onnx": (_read_onnx, "onnx.shape_inference", "onnxruntime", "fastlstm.exchange.onnx_model"),
}

if __name__ == "__main__":
    main()
