"""Properties of the installed GPU as cuDNN 9.19 reads them: an entry of device_properties.json.

    python scripts/read_device_properties.py    # on a machine with a GPU and a CUDA build of torch

`memest/estimator/hardware/device_properties.json` describes GPUs to cuDNN on machines without one.
The figures about thread block clusters are not in cuDNN's JSON text. They follow the compute
capability and the driver in the descriptor's memory (`CLUSTER_INTS` in cudnn_library.py).
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys

import torch

from memest.estimator.ops.cudnn_library import (
    CHAR,
    CLUSTER_INTS,
    DESCRIPTOR_BYTES,
    MEASURED,
    PROPERTIES,
    library,
)

HANDLE_ATTRIBUTE, JSON_ATTRIBUTE = 2701, 2702
"""`CUDNN_ATTR_DEVICEPROP_HANDLE` and `CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`."""

HANDLE_TYPE = 0
"""`CUDNN_TYPE_HANDLE`."""


def main() -> int:
    """Print the entry as JSON; 1 if the layout of the descriptor is not known."""
    torch.zeros(1, device="cuda")
    found = library()
    if found is None or found.version not in MEASURED:
        print("cuDNN 9.19 is needed", file=sys.stderr)
        return 1
    cudnn = found._library
    handle, descriptor, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int64()
    check(cudnn.cudnnCreate(ctypes.byref(handle)))
    check(cudnn.cudnnBackendCreateDescriptor(PROPERTIES, ctypes.byref(descriptor)))
    one = ctypes.c_int64(1)
    check(
        cudnn.cudnnBackendSetAttribute(
            descriptor, HANDLE_ATTRIBUTE, HANDLE_TYPE, one, ctypes.byref(handle)
        )
    )
    check(cudnn.cudnnBackendFinalize(descriptor))
    text = ctypes.create_string_buffer(1 << 16)
    room = ctypes.c_int64(len(text))
    check(
        cudnn.cudnnBackendGetAttribute(
            descriptor, JSON_ATTRIBUTE, CHAR, room, ctypes.byref(count), text
        )
    )
    properties = json.loads(text.raw[: count.value].rstrip(b"\0"))
    memory = ctypes.string_at(descriptor.value, DESCRIPTOR_BYTES)
    head = struct.pack("2i", properties["deviceVer"], properties["driverVer"])
    place = memory.find(head)
    if place < 0:
        print("the descriptor has another layout", file=sys.stderr)
        return 1
    clusters = struct.unpack_from(f"{CLUSTER_INTS}i", memory, place + len(head))
    print(json.dumps({"properties": properties, "clusters": clusters}))
    return 0


def check(status: int) -> None:
    """Raise on an error status of cuDNN."""
    if status:
        raise SystemExit(f"cuDNN returned status {status}")


if __name__ == "__main__":
    sys.exit(main())
