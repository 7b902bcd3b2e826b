"""Logits of every architecture equal transformers', whole or in chunks, alone or beside other rows."""

import pytest
import torch

from kilat.engine.inputs import build_batch
from kilat.ops import kernels
from kilat.policy.sched.plan import Row
from tests.models import tiny

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
PAGE = 8


def logits_of(model, token_ids, chunks, pages, kv):
    """All logits of one session computed in ``chunks`` (sizes) over ``pages``."""
    out, start = [], 0
    for n in chunks:
        row = Row("s", start, token_ids[start : start + n], pages, sample=True, prompt_logprobs=True)
        out.append(model(build_batch([row], PAGE, CPU), kv))
        start += n
    return torch.cat(out)


@pytest.mark.parametrize("name", tiny.configs())
def test_logits_equal_transformers_whole_and_chunked(name):
    reference = tiny.transformers_model(name)
    model = tiny.kilat_model(reference, kernels.reference())
    ids = torch.randint(0, 199, (61,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    pages = [5, 2, 7, 0, 3, 9, 11, 1]
    whole = logits_of(model, ids, [61], pages, tiny.pool(model, 12, PAGE))
    chunked = logits_of(model, ids, [1, 7, 16, 20, 16, 1], pages, tiny.pool(model, 12, PAGE))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(whole, chunked)


def test_rows_of_one_batch_do_not_see_each_other():
    model = tiny.kilat_model(tiny.transformers_model("qwen3"), kernels.reference())
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 199, (n,), generator=generator).tolist() for n in (3, 40, 17)]
    tables = [[0], [1, 2, 3, 4, 5], [6, 7, 8]]
    kv = tiny.pool(model, 9, PAGE)
    rows = [Row(f"s{i}", 0, p, t, sample=True) for i, (p, t) in enumerate(zip(prompts, tables))]
    together = model(build_batch(rows, PAGE, CPU), kv)
    for i, row in enumerate(rows):
        alone = model(build_batch([row], PAGE, CPU), tiny.pool(model, 9, PAGE))
        assert torch.equal(alone[0], together[i])
