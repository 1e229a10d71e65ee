# SPDX-License-Identifier: Apache-2.0
"""A task's way from the driver to its workers: functions by value, arrays once, through memory.

The task is pickled by cloudpickle (lambdas, notebook classes and the task file's own module go by
value; for workers on several hosts, so do the modules beside it). Large tensors and arrays stay
outside the pickle, in the memfd that all workers inherit; each worker maps them copy-on-write, so
the data exists once per host and nobody can spoil it for the others. Only processes started by this
driver can open that memory.

What cannot be pickled (an open file in a Dataset, say) is loaded again in each worker by running
the task file there.
"""

import io
import mmap
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import msgspec
import torch
from torch import Tensor

from manyhands.values.environment import search_path
from manyhands.values.errors import TaskError
from manyhands.values.loaded_task import Loaded, load_task
from manyhands.values.task import Task
from manyhands.values.task_params import recorded
from manyhands.values.worker_orders import Parcel, TorchSettings

LARGE_BYTES = 1 << 14
ALIGN = 64


def torch_settings() -> TorchSettings:
    """Of this process."""
    return TorchSettings(
        str(torch.get_default_dtype()).removeprefix("torch."),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def apply_settings(settings: TorchSettings) -> None:
    if settings == torch_settings():  # setting them makes torch import its compiler (0.7 s)
        return
    torch.set_default_dtype(getattr(torch, settings.dtype))
    torch.set_float32_matmul_precision(settings.matmul)
    torch.use_deterministic_algorithms(settings.deterministic)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is Tensor
            and obj.device.type == "cpu"
            and obj.layout == torch.strided
            and not obj.requires_grad
            and not obj.is_conj()
            and not obj.is_neg()
            and obj.numel() * obj.element_size() >= LARGE_BYTES
        ):
            flat: Any = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(flat), obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def pack(loaded: Loaded, fd: int, *, many: bool = False) -> Parcel:
    """Write the task to the memfd; returns what `unpack` needs to read it.

    `many`: some workers are on hosts that may not have the user's modules.
    """
    own = [loaded.module] if loaded.module is not None else []
    beside = _modules_beside(loaded) if many else []
    try:
        try:
            pickled, buffers = _pickled(loaded.task, [*own, *beside])
        except Exception:  # such a module holds what cannot be pickled: hosts may have it, though
            if not beside:
                raise
            pickled, buffers = _pickled(loaded.task, own)
    except Exception as error:
        if loaded.source is None:
            raise TaskError(
                f"this task cannot be sent to worker processes: {error}. Define what cannot be "
                "pickled (open files, locks, connections) inside a function or __getitem__, or "
                "put the task in a file and use: manyhands train FILE.py"
            ) from error
        return Parcel(
            source=str(loaded.source),
            params=recorded(loaded.params),
            path=sys.path,
            settings=torch_settings(),
        )
    end = _write(fd, pickled, 0)
    stretches: list[tuple[int, int]] = []
    for raw in buffers:
        start = -(-end // ALIGN) * ALIGN
        end = _write(fd, raw, start)
        stretches.append((start, len(raw)))
    table = msgspec.msgpack.encode(stretches)
    start, end = end, _write(fd, memoryview(table), end)
    return Parcel(len(pickled), (start, len(table)), end, list(sys.path), settings=torch_settings())


def _pickled(task: Task, by_value: list[ModuleType]) -> tuple[memoryview, list[memoryview]]:
    """The task, and the large arrays that are not in it. (`__main__` goes by value anyway.)"""
    stream, buffers = io.BytesIO(), list[memoryview]()

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LARGE_BYTES:
            buffers.append(raw)
        return raw.nbytes < LARGE_BYTES

    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(stream, protocol=5, buffer_callback=keep_inside).dump(task)
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return stream.getbuffer(), buffers


def _modules_beside(loaded: Loaded) -> list[ModuleType]:
    """Modules from the folder of the task file, or else of the script, or else from here."""
    script: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    source = loaded.source or (Path(script).resolve() if script else None)
    home = source.parent if source else Path.cwd()
    found: list[ModuleType] = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.startswith(f"{home}/"):
            continue
        ours = name.partition(".")[0] in ("manyhands", "__main__", "__mp_main__")
        inside = {"site-packages", "dist-packages"} & set(Path(file).parts)
        if not ours and not inside and module is not loaded.module and module.__name__ == name:
            found.append(module)
    return found


def _write(fd: int, data: memoryview, offset: int) -> int:
    while data:
        written = os.pwrite(fd, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written
    return offset


def unpack(parcel: Parcel, fd: int) -> Task:
    """The task, in a worker."""
    search_path(parcel.path)
    apply_settings(parcel.settings)
    if parcel.source is not None:
        loaded = load_task(Path(parcel.source), parcel.params)
        for text in loaded.warned:  # into this worker's log
            print(text, file=sys.stderr)
        return loaded.task
    # Copy-on-write: writable for code that insists, private to this worker.
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    everything = memoryview(mmap.mmap(fd, parcel.end, flags=mmap.MAP_PRIVATE, prot=writable))
    start, length = parcel.table
    table = msgspec.msgpack.decode(everything[start : start + length], type=list[tuple[int, int]])
    buffers = [everything[offset : offset + length] for offset, length in table]
    # This pickle was made by our own driver and came through memory only we could open.
    try:
        return pickle.loads(everything[: parcel.pickle_bytes], buffers=buffers)
    except ModuleNotFoundError as error:
        raise TaskError(
            f"{error} on this host. Put it beside the task file, install it here, or send it along "
            "with --ship."
        ) from error
