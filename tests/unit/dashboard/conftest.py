import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Rollout indices of a test lie in a folder of its own, not in the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RLLOOP_CACHE", str(folder))
    return folder / "dashboard"
