"""Engines as they are built: a pool in a memory file, read by another engine through a mapping of its own."""

import mmap

import numpy as np
import pytest

from kilat.base.hashing import page_hash, root_hash
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine
from kilat.policy.sched.moves import Arrived
from tests.engine import fp8_checkpoint
from tests.engine.harness import drain, record, run

pytestmark = pytest.mark.cpu
PROMPT = list(range(3, 43))


@pytest.fixture
def folder(tmp_path):
    return fp8_checkpoint.write(tmp_path / "m", fp8=False)


def engine(folder, **options) -> Engine:
    base = {"kernels": "reference", "threads": 1, "kv_cache_bytes": 1 << 20, "max_num_seqs": 4}
    return build_engine(EngineConfig(str(folder), "hf", "tiny", **{**base, **options}))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_session_goes_on_with_pages_read_from_the_memory_file_of_another_engine(folder, kv_dtype):
    old, new = (engine(folder, shared_pool=True, kv_dtype=kv_dtype) for _ in range(2))
    whole = run(engine(folder, kv_dtype=kv_dtype), [record("s", PROMPT, temperature=0.8)])["s"]
    assert old.pages.layout == new.pages.layout
    old.submit(record("s", PROMPT, temperature=0.8), hand_over=True)
    events = old.step()
    assert old.take_frozen() == ["s"]
    gone = old.depart("s")
    with open(f"/proc/self/fd/{old.pages.fd}", "rb") as file:  # as another process of the host would
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    peer = np.frombuffer(memory, np.uint8).reshape(-1, old.pages.layout.page_bytes)
    reserved = new.reserve(len(gone.pages))
    new.pages.view[reserved] = peer[gone.pages]
    old.unpin(gone.pages)
    new.submit(gone.record, Arrived(reserved, gone.n_tokens))
    events += drain(new)
    assert [t for e in events for t in e.token_ids] == whole
    old.close()
    new.close()


def test_pages_are_private_unless_asked(folder):
    private = engine(folder)
    assert private.pages.fd is None
    private.close()


def test_the_layout_names_the_root_of_all_page_names(folder):
    e = engine(folder, shared_pool=True)
    e.submit(record("s", PROMPT))
    e.step()
    first, second, *_ = e.export("s").page_hashes
    n = e.pages.layout.page_tokens
    assert first == page_hash(root_hash(e.pages.layout.model), PROMPT[:n])
    assert second == page_hash(first, PROMPT[n : 2 * n])
    assert {first, second} <= set(e.page_names())
    assert e.pages.n_pages == e.info.n_pages
    e.close()
