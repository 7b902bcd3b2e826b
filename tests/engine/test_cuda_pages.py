"""Pages between a CUDA device and the host's memory."""

import pytest
import torch

from kilat.engine.kv_memory import PageMemory, page_layout

pytestmark = pytest.mark.gpu
LAYOUT = page_layout(3, 16, 2, 8, torch.bfloat16, "m")


def test_pages_of_a_device_are_saved_and_loaded_beside_a_running_step():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    memory = PageMemory(LAYOUT, 3, device)
    memory.kv[1] = 0.5
    into = memory.host_bytes(LAYOUT.page_bytes)
    assert torch.from_numpy(into).is_pinned()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # the step that runs: a second
    busy = torch.cuda.Event()
    busy.record()
    memory.save(1, into)
    assert memory.load(2, lambda page: page.__setitem__(slice(None), into) is None)
    assert not busy.query(), "a copy waited for the step"
    torch.cuda.synchronize()
    assert torch.all(memory.kv[2] == 0.5)
