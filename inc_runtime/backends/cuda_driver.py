"""The few driver calls that the GPU backend needs: context, memory, pinned records, launches with structures as arguments.

Every call is checked. `cuda.bindings` is imported on first use, so that the package imports without a GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from inc_runtime.errors import PlacementError

READY_LIMIT_S = 20.0
NOT_READY = (46, 805, 806, 807, 809)
"""CUDA_ERROR_DEVICE_UNAVAILABLE and the errors of an MPS server that is starting, stopping or full."""


@cache
def driver() -> Any:
    """The driver module of cuda.bindings. Raises PlacementError where it is not installed."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise PlacementError("the GPU backend needs cuda-bindings. Install it with: pip install 'cuda-python>=13'") from error
    return module


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function and return its results. Raises PlacementError with the name and text of the error."""
    status, *results = getattr(driver(), name)(*arguments)
    if int(status):
        text = driver().cuGetErrorString(status)[1]
        raise PlacementError(
            f"{name} failed: {text.decode() if text else status}. If another client of MPS faulted, restart the daemon."
        )
    return results[0] if len(results) == 1 else results or None


def call_when_ready(name: str, *arguments: Any) -> Any:
    """Like `call`, but gives MPS time: right after another job ended, its server refuses new clients for a while."""
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        status, *results = getattr(driver(), name)(*arguments)
        if int(status) not in NOT_READY or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return results[0] if results and int(status) == 0 else call(name, *arguments)


def num_sms_of_gpus() -> list[int]:
    """SMs of every GPU that this process sees."""
    call_when_ready("cuInit", 0)
    attribute = driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return [call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", gpu)) for gpu in range(call("cuDeviceGetCount"))]


class Gpu:
    """The primary context of one GPU, made current; one stream for kernels and one for copies."""

    def __init__(self, index: int) -> None:
        call_when_ready("cuInit", 0)
        self.device = call("cuDeviceGet", index)
        self.context = call_when_ready("cuDevicePrimaryCtxRetain", self.device)
        call("cuCtxSetCurrent", self.context)
        non_blocking = driver().CUstream_flags.CU_STREAM_NON_BLOCKING
        self.kernel_stream = call("cuStreamCreate", non_blocking)
        self.copy_stream = call("cuStreamCreate", non_blocking)
        self._functions: dict[tuple[Path, str], Any] = {}
        self._modules: dict[Path, Any] = {}

    @property
    def arch(self) -> str:
        attribute = driver().CUdevice_attribute
        major = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.device)
        minor = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.device)
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    @property
    def name(self) -> str:
        return call("cuDeviceGetName", 256, self.device).split(b"\0")[0].decode()

    def free_bytes(self) -> int:
        return call("cuMemGetInfo")[0]

    def allocate(self, num_bytes: int, fill: int = 0) -> int:
        address = int(call("cuMemAlloc", max(num_bytes, 16)))
        self.fill(address, fill, num_bytes)
        return address

    def free(self, address: int) -> None:
        call("cuMemFree", address)

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        if num_bytes:
            call("cuMemsetD8Async", address, value, num_bytes, self.copy_stream)
            call("cuStreamSynchronize", self.copy_stream)

    def write(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        if array.nbytes:
            call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self.copy_stream)
            call("cuStreamSynchronize", self.copy_stream)

    def read(self, address: int, num_bytes: int) -> np.ndarray:
        """A copy of device memory: [num_bytes] uint8. Works while a kernel runs."""
        array = np.empty(num_bytes, np.uint8)
        if num_bytes:
            call("cuMemcpyDtoHAsync", array.ctypes.data, address, num_bytes, self.copy_stream)
            call("cuStreamSynchronize", self.copy_stream)
        return array

    def pinned(self, dtype: np.dtype) -> tuple[np.ndarray, int]:
        """A structure in pinned host memory that kernels can write: its view and its device address."""
        flags = driver().CU_MEMHOSTALLOC_DEVICEMAP | driver().CU_MEMHOSTALLOC_PORTABLE
        host = int(call("cuMemHostAlloc", dtype.itemsize, flags))
        buffer = (ctypes.c_char * dtype.itemsize).from_address(host)
        view = np.frombuffer(memoryview(buffer), dtype)
        view.view(np.uint8)[...] = 0
        return view, int(call("cuMemHostGetDevicePointer", host, 0))

    def module(self, cubin: Path) -> Any:
        if cubin not in self._modules:
            self._modules[cubin] = call("cuModuleLoadData", cubin.read_bytes())
        return self._modules[cubin]

    def function(self, cubin: Path, name: str) -> Any:
        if (cubin, name) not in self._functions:
            self._functions[cubin, name] = call("cuModuleGetFunction", self.module(cubin), name.encode())
        return self._functions[cubin, name]

    @property
    def num_sms(self) -> int:
        attribute = driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return call("cuDeviceGetAttribute", attribute, self.device)

    def resident_blocks(self, function: Any, num_threads: int, shared_bytes: int = 0) -> int:
        """Blocks of a kernel that the GPU holds at once, when nothing else runs."""
        return call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, num_threads, shared_bytes) * self.num_sms

    def launch(
        self,
        function: Any,
        arguments: Sequence[np.ndarray],
        *,
        num_blocks: int,
        num_threads: int,
        shared_bytes: int = 0,
        resident: bool = True,
        stream: int | None = None,
    ) -> None:
        """Start a kernel on `stream`, by default the kernel stream. `arguments`: zero-dimensional arrays, passed by value.

        `resident`: refuse a grid whose blocks cannot all be on the GPU at once. Raises PlacementError.
        """
        attribute = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if shared_bytes > 48 * 1024:
            call("cuFuncSetAttribute", function, attribute, shared_bytes)
        if resident and num_blocks > (most := self.resident_blocks(function, num_threads, shared_bytes)):
            raise PlacementError(f"{num_blocks} blocks of {num_threads} threads cannot all be resident: the GPU holds {most}.")
        held = [np.ascontiguousarray(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(argument.ctypes.data for argument in held))
        call(
            "cuLaunchKernel",
            function,
            num_blocks,
            1,
            1,
            num_threads,
            1,
            1,
            shared_bytes,
            self.kernel_stream if stream is None else stream,
            ctypes.addressof(pointers),
            0,
        )

    def elapsed_us(self, start: Callable[[], None]) -> float:
        """Microseconds that the work started by `start` takes on the kernel stream."""
        begin, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
        call("cuEventRecord", begin, self.kernel_stream)
        start()
        call("cuEventRecord", end, self.kernel_stream)
        call("cuEventSynchronize", end)
        return call("cuEventElapsedTime", begin, end) * 1e3

    def running(self) -> bool:
        """True while the kernel stream has work. Raises PlacementError where a kernel faulted."""
        status = int(driver().cuStreamQuery(self.kernel_stream)[0])
        if status == int(driver().CUresult.CUDA_ERROR_NOT_READY):
            return True
        if status:
            call("cuStreamSynchronize", self.kernel_stream)
        return False
