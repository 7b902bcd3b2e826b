"""One kernel that copies pages between two pools on one device, each from and to where it lies."""

import triton
import triton.language as tl
from torch import Tensor

WORDS = 2048
"""Words of 8 bytes of a program: 16 KB."""


def copy_pages(source: Tensor, into: Tensor, source_pages: Tensor, into_pages: Tensor) -> None:
    """into[into_pages[i]] = source[source_pages[i]]: pools int64 [pages, words] in rows of the same length, page numbers int32 [n] on the
    same device. Launched on the current stream; page numbers are not checked."""
    n_words = source.shape[1]
    _copy[(len(source_pages), triton.cdiv(n_words, WORDS))](
        source, into, source_pages, into_pages, n_words, WORDS=WORDS, num_warps=8
    )


@triton.jit
def _copy(source_ptr, into_ptr, source_pages_ptr, into_pages_ptr, n_words, WORDS: tl.constexpr):
    i = tl.program_id(0)
    source = source_ptr + tl.load(source_pages_ptr + i).to(tl.int64) * n_words
    into = into_ptr + tl.load(into_pages_ptr + i).to(tl.int64) * n_words
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    tl.store(into + at, tl.load(source + at, mask=at < n_words, other=0), mask=at < n_words)
