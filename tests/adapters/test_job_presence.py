"""Who is alone with a file of jobs."""

from pathlib import Path

from headrace.adapters.jobs.presence import Presence


def test_only_the_first_is_alone_until_it_is_gone(tmp_path: Path) -> None:
    """Locks belong to what was opened, so that two in one process are as two processes."""
    jobs = tmp_path / "jobs.db"
    first, second = Presence(jobs), Presence(jobs)
    assert first.alone()
    assert not second.alone(), "the first still looks after what others left"
    first.share()
    assert not second.alone()
    second.share()
    first.leave()
    third = Presence(jobs)
    assert not third.alone()
    second.leave()
    assert third.alone()
    third.leave()
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
