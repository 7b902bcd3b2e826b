"""The sums over running sessions that a draft keeps while it admits are those that a fresh look would give."""

from random import Random

import pytest

from kilat.policy.sched.draft import Draft
from tests.policy.sched.fakes import Rig

pytestmark = pytest.mark.logic


@pytest.mark.parametrize("seed", range(12))
def test_sums_of_a_draft_follow_every_admission_and_chunk(seed: int, monkeypatch: pytest.MonkeyPatch):
    n_checked = 0
    fits = Draft._fits

    def checked(draft, session, n_have):
        nonlocal n_checked
        n_checked += len(draft.roster.running) > 0
        assert draft.promised == draft.roster.n_promised()
        assert set(draft.computing) == {s for s in draft.roster.running if s.is_computing_pages}
        return fits(draft, session, n_have)

    monkeypatch.setattr(Draft, "_fits", checked)
    random = Random(seed)
    rig = Rig(
        depth=random.choice((1, 2)), n_pages=random.choice((12, 40)), page_tokens=random.choice((1, 4)), max_model_len=40,
        max_num_seqs=8, max_step_tokens=24, prefix_cache=seed % 3 > 0, max_waiting=100,
    )  # fmt: skip
    for i in range(40):
        prompt = [0, 1] * random.randrange(3) + [
            random.randrange(90) for _ in range(1 + random.randrange(12))
        ]
        rig.submit(f"s{i}", prompt[:9], max_tokens=1 + random.randrange(8), n=random.choice((1, 1, 3)))
        for _ in range(random.randrange(3)):
            rig.step()
    rig.run()
    assert n_checked > 20
