"""The dashboard: a run's files in a browser. It reads, and never touches the run.

    panels      which metrics are shown together, and how; the one list that every view is made of
    runs        finding runs; reading records that may be growing, rewound or damaged
    rollouts    an index over completions, kept outside the run, so that a million of them are no scan
    server      pages, data, live events and Prometheus, behind a token
    workspace   the same panels as a Weights & Biases workspace
    demo        a recorded run, one part of it replayed, for those who have none

Nothing here imports torch.
"""
