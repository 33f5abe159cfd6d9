"""Runs as an experiment: arms, verdicts, reports, and engines that drift on purpose."""
