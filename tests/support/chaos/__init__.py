"""A campaign that tries to break a fleet: seeded faults, processes, and a checker that reads only records.

    python -m tests.support.chaos --seeds 200     # or `make chaos SEEDS=200`; goes on where it was stopped
    python -m tests.support.chaos --replay '[...]' # one schedule, as results and failures print it

`schedule` draws the faults of a seed, `proxy` is the network, `child` what a process does to itself, `fleet` starts and
hurts the processes, `checker` decides, `campaign` runs seeds, shrinks what fails and keeps the results.
"""
