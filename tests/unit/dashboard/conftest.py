from tests.support.dashboard_runs import own_cache as own_cache
