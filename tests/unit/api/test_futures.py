"""Results that wait for their clients."""

from rlloop.api.futures import Futures, Outcome


def test_what_was_sent_is_kept_as_far_as_it_is_new(monkeypatch):
    monkeypatch.setattr("rlloop.api.futures.SENT", 2)
    futures = Futures()
    made = [futures.add(f"m:{number}", "client", "optim_step", 0) for number in range(7)]
    for future in made[:6]:
        futures.resolve(future, Outcome(b""))
    for number in (0, 1, 3, 4):
        futures.collected(made[number])
    futures.resolve(futures.add("other:0", "client", "optim_step", 0), Outcome(b""))
    assert [future.request_id for future in futures.kept("m:")] == ["m:2", "m:3", "m:4", "m:5"]
