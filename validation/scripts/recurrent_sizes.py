"""Asks cuDNN for the workspaces and reserve spaces of random recurrent layers; runs none of them.

python recurrent_sizes.py FILE [NUMBER]

FILE gets a JSON list with a row a layer: the columns of `COLUMNS`. The formulas of
memest/estimator/ops/recurrent.py are fitted to 11,100 rows of an H200 (cuDNN 9.19).
"""

import ctypes
import json
import random
import sys

import torch

COLUMNS = (
    "kind", "steps", "batch", "rows", "width", "hidden", "projection", "layers", "dtype",
    "is_both", "is_packed", "dropout", "algorithm", "inference", "training", "reserve",
)  # fmt: skip
KINDS = ("RELU", "RNN", "LSTM", "GRU")  # in the order of `cudnnRNNMode_t`
STANDARD, STATIC, SMALL = 0, 1, 3  # `cudnnRNNAlgo_t`
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}  # `cudnnDataType_t`
DOUBLE_BIAS, PADDED_IO, UNPACKED, PACKED = 2, 1, 0, 1
STEPS, BATCHES = (2, 5, 10, 28, 50, 96, 128, 200, 256), (1, 2, 4, 7, 8, 16, 20, 32, 64, 100, 128)
WIDTHS = (8, 16, 28, 40, 64, 100, 128, 200, 256, 300, 512)
NARROW, WIDE = (8, 16, 20, 32, 50, 64, 96, 100, 128), (150, 200, 256, 400, 512, 650, 1024)


class Cudnn:
    """The cuDNN that torch has loaded."""

    def __init__(self):
        torch.nn.LSTM(8, 8).cuda()(torch.zeros(2, 2, 8, device="cuda"))
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next(line.split()[-1] for line in maps if "libcudnn.so" in line)
        self._library = ctypes.CDLL(path)
        self._handle = self._made("cudnnCreate")
        self._dropout = self._made("cudnnCreateDropoutDescriptor")
        size = ctypes.c_size_t()
        self._call("cudnnDropoutGetStatesSize", self._handle, ctypes.byref(size))
        self._states = torch.empty(size.value, dtype=torch.uint8, device="cuda")

    def sizes(self, row):
        """Return the workspace of inference and of training, and the reserve space, in bytes."""
        call, dtype = self._call, DTYPES[row["dtype"]]
        states, dropout = self._states, ctypes.c_float(row["dropout"])
        place = ctypes.c_void_p(states.data_ptr()), ctypes.c_size_t(states.numel())
        seed = ctypes.c_ulonglong(0)
        call("cudnnSetDropoutDescriptor", self._dropout, self._handle, dropout, *place, seed)
        layers = self._made("cudnnCreateRNNDescriptor")
        call(
            "cudnnSetRNNDescriptor_v8", layers, row["algorithm"], KINDS.index(row["kind"]),
            DOUBLE_BIAS, int(row["is_both"]), 0, dtype, dtype if dtype == 1 else 0,
            int(dtype in (2, 9)), row["width"], row["hidden"], row["projection"] or row["hidden"],
            row["layers"], self._dropout, 0 if row["is_packed"] else PADDED_IO,
        )  # fmt: skip
        data, lengths, zero = self._made("cudnnCreateRNNDataDescriptor"), row["lengths"], 0.0
        call(
            "cudnnSetRNNDataDescriptor", data, dtype, PACKED if row["is_packed"] else UNPACKED,
            row["steps"], row["batch"], row["width"], (ctypes.c_int * len(lengths))(*lengths),
            ctypes.byref(ctypes.c_double(zero)),
        )  # fmt: skip
        work, reserve = [ctypes.c_size_t(), ctypes.c_size_t()], ctypes.c_size_t()
        for mode in (0, 1):
            found = ctypes.byref(work[mode]), ctypes.byref(reserve)
            call("cudnnGetRNNTempSpaceSizes", self._handle, layers, mode, data, *found)
        call("cudnnDestroyRNNDescriptor", layers)
        call("cudnnDestroyRNNDataDescriptor", data)
        return work[0].value, work[1].value, reserve.value

    def _call(self, name, *args):
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name}: status {status}")

    def _made(self, name):
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made))
        return made


def layer(group):
    """Return a random layer of a group, without its sizes."""
    pick, kind = random.choice, pick_kind(group)
    steps, batch = pick((*STEPS, 300, 400)), pick(BATCHES)
    row = {
        "kind": kind, "steps": steps, "batch": batch, "width": pick(WIDTHS), "projection": 0,
        "hidden": pick((*NARROW, *WIDE)), "layers": pick((1, 2, 3, 4)),
        "dtype": pick(tuple(DTYPES)), "is_both": pick((True, False)), "dropout": pick((0.0, 0.5)),
        "is_packed": group == "packed", "algorithm": STANDARD, "lengths": [steps] * batch,
    }  # fmt: skip
    if group == "small":
        widest = (150, 192) if kind in ("LSTM", "GRU") else (192, 256, 384)
        row |= {"algorithm": SMALL, "hidden": pick((*NARROW, *widest))}
        row["dtype"] = pick(("float32", "float16"))
    elif group == "static":
        row |= {"algorithm": STATIC, "layers": 1, "is_both": False, "dtype": "float16"}
        row |= {"width": pick((128, 256, 512)), "hidden": pick((128, 256, 512, 896, 1024))}
        row |= {"batch": pick((8, 16, 32, 64, 96, 128)), "dropout": 0.0}
        row["lengths"] = [steps] * row["batch"]
    elif group == "packed":
        shorter = (random.randint(1, steps) for _ in range(batch - 1))
        row["lengths"] = [steps, *sorted(shorter, reverse=True)]
    elif group == "projection":
        row["projection"] = max(1, row["hidden"] // pick((2, 4)))
    return row | {"rows": sum(row["lengths"])}


def pick_kind(group):
    """Return the name of a cell; only an LSTM has projections."""
    return "LSTM" if group == "projection" else random.choice(KINDS)


def main():
    """Ask for as many random layers as the command line says."""
    cudnn, rows = Cudnn(), []
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 11_100
    groups = ("small", "small", "standard", "packed", "projection", "static")
    for i in range(number):
        row = layer(groups[i % len(groups)])
        row |= dict(zip(COLUMNS[-3:], cudnn.sizes(row), strict=True))
        rows.append([row[name] for name in COLUMNS])
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(rows, file)


if __name__ == "__main__":
    main()
