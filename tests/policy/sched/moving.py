"""Helpers of tests in which sessions and pages move between two rigs."""

from msgspec.structs import replace

from kilat.policy.sched.moves import Arrived, Departed
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import Rig

PROMPT = [5, 4, 3, 2, 1, 0, 6, 7, 8, 9]  # two pages and a half


def copy_pages(old: Rig, pages: list[int], new: Rig) -> list[int]:
    """Reserve in ``new`` and copy what ``old`` has on ``pages``."""
    reserved = new.scheduler.reserve(len(pages))
    for source, target in zip(pages, reserved, strict=True):
        new.runner.kv[target] = list(old.runner.kv[source])
    return reserved


def adopt(old: Rig, gone: Departed, new: Rig) -> None:
    """All of ``gone`` arrives; what it left behind is unpinned."""
    arrived = Arrived(copy_pages(old, gone.pages, new), gone.n_tokens)
    new.scheduler.submit(replace(gone.record, epoch=gone.record.epoch + 1), new.now_s, arrived)
    old.scheduler.unpin(gone.pages)
    for rig in (old, new):
        rig.scheduler.check()


def handed_over(rig: Rig, session_id: str = "a", prompt=PROMPT, **options) -> tuple[SessionRecord, Departed]:
    """A session that has left after its first token."""
    r = rig.submit(session_id, prompt, hand_over=True, **options)
    while session_id not in (frozen := rig.scheduler.take_frozen()):
        rig.step()
    assert frozen == [session_id]
    return r, rig.scheduler.depart(session_id)


def rows_of(rig: Rig, session_id: str) -> list[tuple[int, int]]:
    return [(r.start, r.n_tokens) for p in rig.plans for r in p.rows if r.session_id == session_id]
