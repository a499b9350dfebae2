"""What XLA, its allocators and NumPy write when memory runs out is read right."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxmem.errors import DeviceOutOfMemoryError
from jaxmem.monitor.oom.texts import is_out_of_memory, read
from jaxmem.units import GIB, MIB

REPORT = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    6.00MiB
              constant allocation:         0B
        maybe_live_out allocation:    9.64GiB
     preallocated temp allocation:    4.44GiB
                 total allocation:   14.44GiB
              total fragmentation:  680.30MiB (4.60%)
Peak buffers:
\tBuffer 1:
\t\tSize: 6.00MiB
\t\tOperator: op_name="jit(f)/jvp(Block_0)/mlp/dot_general" source_file="/a/train.py" source_line=41
\t\tXLA Label: fusion
\t\tShape: f32[4096,128,3]
\t\t==========================

\tBuffer 2:
\t\tSize: 384.0KiB
\t\tEntry Parameter Subshape: f32[256,128,3]
\t\t==========================
"""
TPU = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space \
hbm. Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G.

Total hbm usage >= 22.47G:
    reserved        530.00M
    program          21.95G
    arguments            0B

  Largest program allocations in hbm:

  1. Size: 2.00G
     Operator: op_name="jit(f)/attention/dot_general" source_file="/x/attention.py" source_line=10
     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}
     Unpadded size: 2.00G
     XLA label: fusion.1265 = fusion(custom-call.224), kind=kOutput
     Allocation type: HLO temp
     ==========================
"""
CASES = {
    "bytes": (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
        "device",
        16 * GIB,
    ),
    "a size": (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB.: while running "
        "replica 0 and partition 0 of a replicated computation (other replicas may have failed)",
        "device",
        16 * GIB,
    ),
    "the allocator": (
        "RESOURCE_EXHAUSTED: Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.25GiB "
        "(rounded to 1342177280)requested by op",
        "device",
        1342177280,
    ),
    "the stream executor": (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device "
        "ordinal 0",
        "device",
        184549376,
    ),
    "CPU": ("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.", "device", 2**46),
    "ValueError of old": (
        "Resource exhausted: Out of memory allocating 4096 bytes.",
        "device",
        4096,
    ),
    "CUDA": ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "device", None),
    "TPU at run time": (
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 16.00G. That "
        "was not possible. There are 15.48G free.; (0x0x0_HBM0)",
        "device",
        16 * GIB,
    ),
    "autotuning": (
        "RESOURCE_EXHAUSTED: Autotuning failed for HLO: Out of memory while trying to allocate "
        "1024 bytes.",
        "compile",
        1024,
    ),
    "pinned staging": (
        "RESOURCE_EXHAUSTED: Failed to allocate a 8388608-byte pinned host staging buffer for a "
        "host-to-device transfer. The pinned host pool may be exhausted or fragmented (see "
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB)",
        "pinned host",
        8388608,
    ),
    "pinned pool": (
        "RESOURCE_EXHAUSTED: Allocator (xla_gpu_host_bfc) ran out of memory trying to allocate "
        "2.00GiB (rounded to 2147483648)requested by op",
        "pinned host",
        2 * GIB,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_is_read(case: str):
    text, where, requested = CASES[case]
    for kind in (ValueError, RuntimeError, jax.errors.JaxRuntimeError):
        assert is_out_of_memory(kind(text))
        told = read(kind(text))
        assert (told.where, told.requested_bytes) == (where, requested)
        assert told.message == text


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262144, available 232448",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17M of 16M vmem.",
        "RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)",
        "INTERNAL: something else",
        "",
    ],
)
def test_what_is_no_memory_of_the_device_is_not_taken_for_it(text: str):
    assert not is_out_of_memory(RuntimeError(text))


def test_an_error_of_jaxmem_or_ctrl_c_is_none():
    text = "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."
    assert not is_out_of_memory(DeviceOutOfMemoryError(text, explanation=None))
    assert not is_out_of_memory(KeyboardInterrupt(text))


def test_the_report_of_a_gpu_program_is_read():
    told = read(RuntimeError(REPORT))
    assert told.requested_bytes == 6 * MIB
    assert told.stats["maybe_live_out"] == int(9.64 * GIB)
    assert told.stats["preallocated temp"] == int(4.44 * GIB)
    first, second = told.buffers
    assert (first.nbytes, first.source, first.shape) == (6 * MIB, "train.py:41", "f32[4096,128,3]")
    assert first.operation == "jit(f)/jvp(Block_0)/mlp/dot_general"
    assert (second.nbytes, second.source, second.shape) == (393216, "", "f32[256,128,3]")


def test_the_report_of_a_tpu_compile_is_read():
    told = read(RuntimeError(TPU))
    assert told.where == "compile"
    assert told.requested_bytes == int(6.47 * GIB)
    assert (told.program_bytes, told.limit_bytes) == (int(21.95 * GIB), int(15.48 * GIB))
    (buffer,) = told.buffers
    assert (buffer.nbytes, buffer.source) == (2 * GIB, "attention.py:10")
    assert buffer.label.startswith("fusion.1265")


def test_memory_of_the_host_is_told_apart():
    with pytest.raises(MemoryError) as caught:
        np.ones((2**23, 2**23))
    told = read(caught.value)
    assert told.where == "host"
    assert told.requested_bytes == 2**49
    assert read(MemoryError()).requested_bytes is None


@pytest.mark.parametrize("text", [REPORT, TPU, *(text for text, *_ in CASES.values())])
def test_a_text_that_is_cut_anywhere_is_still_read(text: str):
    for end in range(0, len(text), 7):
        read(RuntimeError(text[:end]))
        read(RuntimeError(text[end:]))
