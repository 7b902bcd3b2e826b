"""The CUDA backend's table of functions (native/runtime/backend.h) through ctypes, and random models to run on it."""

import ctypes as c
import dataclasses
import fcntl
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/native/libkilat_cuda.so"
EMULATED = ROOT / "build/native/libkilat_cuda_emulated.so"
F32, F16, Q4_0, Q4_1, BF16, F8 = 0, 1, 2, 3, 30, 1000
DTYPE_BF16 = 2
STORED, WIDE = 1, 2
KEEP_LAYERS = 1


class Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("rows", c.c_int64),
        ("cols", c.c_int64),
        ("row_bytes", c.c_int64),
        ("type", c.c_int32),
        ("paired_heads", c.c_int32),
        ("scales", c.c_void_p),
        ("scale_type", c.c_int32),
        ("block_rows", c.c_int32),
        ("block_cols", c.c_int32),
    ]


WEIGHTS = ("norm_in", "q", "k", "v", "o", "norm_mid", "gate", "up", "down")
BIASES = ("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias")
HEAD_NORMS = ("q_norm", "k_norm")


class Layer(c.Structure):
    _fields_ = [(name, Tensor) for name in (*WEIGHTS, *BIASES, *HEAD_NORMS)] + [("window", c.c_int64)]


_SIZES = (
    "vocab",
    "hidden",
    "inner",
    "n_layers",
    "q_heads",
    "kv_heads",
    "head_dim",
    "rotary",
    "max_context",
)


class Model(c.Structure):
    _fields_ = [
        *[(name, c.c_int64) for name in _SIZES],
        ("norm_eps", c.c_double),
        ("qk_norm_eps", c.c_double),
        ("inverse_frequencies", c.POINTER(c.c_float)),
        ("rope_factor", c.c_float),
        ("dtype", c.c_int32),
        ("weights", c.c_int32),
        ("tied", c.c_int32),
        ("embedding", Tensor),
        ("norm", Tensor),
        ("head", Tensor),
        ("layers", c.POINTER(Layer)),
    ]


class Draw(c.Structure):
    _fields_ = [(name, c.c_double) for name in ("temperature", "top_p", "min_p", "u")] + [
        ("top_k", c.c_int64)
    ]


class Failure(c.Structure):
    _fields_ = [("text", c.c_char * 512)]


class Memory(c.Structure):
    _fields_ = [("owner", c.c_char_p), ("host_bytes", c.c_int64), ("device_bytes", c.c_int64)]


def _function(result, *arguments):
    return c.CFUNCTYPE(result, *arguments)


_P, _I, _L = c.c_void_p, c.c_int, c.c_int64
_F = c.POINTER(Failure)


class Backend(c.Structure):
    _fields_ = [
        ("model_build", _function(_I, c.POINTER(Model), _P, c.POINTER(_P), _F)),
        ("model_free", _function(None, _P)),
        ("model_kernels", _function(c.c_char_p, _P)),
        ("model_weights", _function(_I, _P)),
        ("model_memory", _function(_I, _P, c.POINTER(Memory), _I)),
        ("session_create", _function(_I, _P, _L, _L, c.POINTER(_P), _F)),
        ("session_free", _function(None, _P)),
        ("session_memory", _function(_I, _P, c.POINTER(Memory), _I)),
        ("forward", _function(_I, _P, _P, _L, _L, *[c.POINTER(Draw)] * 2, c.POINTER(c.c_int32), _F)),
        ("sample", _function(_I, _P, c.POINTER(Draw), c.POINTER(c.c_int32), _F)),
        ("logits_read", _function(_I, _P, _P, _F)),
        ("layers_read", _function(_I, _P, _P, _F)),
        ("state_bytes", _function(_L, _P, _L)),
        ("state_read", _function(_I, _P, _L, _P, _F)),
        ("state_write", _function(_I, _P, _L, _P, _F)),
    ]


def build_library(emulated: bool = False) -> Path:
    """The library of the backend and its checks, or of the backend on an emulated device; built again when a source is newer."""
    folders = ("cuda", "runtime", "tests", "tests/emulated")
    sources = [p for folder in folders for p in (ROOT / "native" / folder).iterdir() if p.is_file()]
    library = EMULATED if emulated else LIBRARY
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:  # processes that share the tests build once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() or library.stat().st_mtime < max(p.stat().st_mtime for p in sources):
            script = "native/tests/emulated/build.sh" if emulated else "native/cuda/build.sh"
            fresh = library.with_suffix(".new.so")  # nobody loads a part of a file
            subprocess.run(["sh", str(ROOT / script), str(fresh)], check=True, timeout=300)
            fresh.replace(library)
    return library


def load_library(path: Path) -> c.CDLL:
    """The library with the result types that ctypes cannot guess."""
    lib = c.CDLL(str(path))
    lib.kilat_cuda_backend.restype = c.POINTER(Backend)
    if path != EMULATED:
        lib.kilat_read_bandwidth.restype = c.c_double
        lib.kilat_compare_format.restype = c.c_int64
    return lib


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor as a file has it (``data`` uint8 or plain numbers on the host), and its exact values (fp32, on the device)."""

    data: torch.Tensor
    values: torch.Tensor
    type: int
    scales: torch.Tensor | None = None

    def described(self, paired_heads: int = 0) -> Tensor:
        rows, cols = self.values.shape if self.values.dim() == 2 else (1, len(self.values))
        n_bytes = self.data.numel() * self.data.element_size()
        t = Tensor(self.data.data_ptr(), rows, cols, n_bytes // rows, self.type, paired_heads)
        if self.scales is not None:
            t.scales, t.scale_type, t.block_rows, t.block_cols = self.scales.data_ptr(), F32, 128, 128
        return t


def plain(values: torch.Tensor) -> Weight:
    """bf16 numbers."""
    data = values.to(torch.bfloat16)
    return Weight(data.cpu(), data.float(), BF16)


def fp8(values: torch.Tensor) -> Weight:
    """e4m3 blocks of 128 x 128."""
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -cols % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-30)
    data = (blocks / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    exact = (data.float() * scale[:, None, :, None]).view(padded.shape)[:rows, :cols]
    stored = data.view(padded.shape)[:rows, :cols].contiguous()
    return Weight(stored.view(torch.uint8).cpu(), exact.contiguous(), F8, scale.cpu())


def q4(values: torch.Tensor, minima: bool) -> Weight:
    """Q4_0, or Q4_1 with ``minima``: groups of 32 of a row."""
    rows, cols = values.shape
    groups = values.float().view(rows, cols // 32, 32)
    low = groups.amin(-1, keepdim=True) if minima else None
    if low is not None:
        low = low.half().float()
        d = ((groups.amax(-1, keepdim=True) - low) / 15).half()
        q = ((groups - low) / d.float().clamp_min(1e-8)).round().clamp(0, 15)
        exact = q * d.float() + low
    else:
        d = (groups.abs().amax(-1, keepdim=True) / 8).half()
        q = (groups / d.float().clamp_min(1e-8)).round().add(8).clamp(0, 15)
        exact = (q - 8) * d.float()
    n = q.to(torch.uint8)
    packed = n[..., :16] | (n[..., 16:] << 4)
    head = [d.view(torch.uint8)] + ([low.half().view(torch.uint8)] if low is not None else [])
    data = torch.cat([*head, packed], -1).reshape(rows, -1)
    return Weight(data.contiguous().cpu(), exact.reshape(rows, cols), Q4_1 if minima else Q4_0)


PACKERS = {
    "bf16": plain,
    "fp8": fp8,
    "q4_0": lambda w: q4(w, False),
    "q4_1": lambda w: q4(w, True),
}
