"""Every bug that campaigns/planted_bugs.py plants still has its place in the sources."""

import importlib


def test_every_planted_bug_has_one_place(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "campaigns")
    campaign = importlib.import_module("planted_bugs")
    bug = campaign.BUGS[0]
    assert campaign.misplaced() == []
    assert len(campaign.misplaced((bug._replace(old="no source has this"),))) == 1
    assert [b.name for b in campaign.BUGS if b.old == b.new] == []
    named = {test for b in campaign.BUGS for test in b.tests}
    assert [test for test in sorted(named) if not (repository / test).exists()] == []
