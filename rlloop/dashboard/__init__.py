"""The dashboard: runs in a browser. It reads the runs' files, and writes their notes alone.

    panels      metrics shown together, and how; all views are made from this list
    runs        finds runs; reads records that may be growing, rewound or damaged
    rollouts    an index over completions, kept outside the run
    tokens      a completion as a conversation of tokens; chat_text: messages in a text
    notes       a run's note and tags
    watch       alerts of all runs
    training_api  the state of `rlloop serve api`
    server      pages, data, live events and Prometheus, behind a token
    workspace   the same panels as a Weights & Biases workspace
    demo        recorded runs, one of them replayed as if live

Nothing here imports torch.
"""
