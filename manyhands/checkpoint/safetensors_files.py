# SPDX-License-Identifier: Apache-2.0
"""safetensors files, written in pieces from memory we own; read by the safetensors package.

The package's own writer first copies everything into one bytes object while holding the GIL; a
background thread that writes must not stop the training thread, so the format (a length, a JSON
header, the raw bytes) is written here directly.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyhands.values.errors import CheckpointDamaged

CHUNK = 8 << 20

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, chunk by chunk. Tensors must be contiguous, on the CPU."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    # Widest elements first, then by name: every tensor is then aligned to its own size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        raw = _raw(tensor)
        for start in range(0, len(raw), CHUNK):
            yield raw[start : start + CHUNK]


def can_encode(tensor: Tensor) -> bool:
    return tensor.dtype in _NAMES


def decode(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a file, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointDamaged(f"{path} is not a readable safetensors file: {error}") from error


def fingerprint(path: Path) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor: Tensor = file.get_tensor(name)
                kind = str(tensor.dtype).removeprefix("torch.")
                digest.update(f"{name} {kind} {list(tensor.shape)}\n".encode())
                digest.update(_raw(tensor.contiguous()))
    except (OSError, SafetensorError) as error:
        raise CheckpointDamaged(f"{path} is not a readable safetensors file: {error}") from error
    return digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
