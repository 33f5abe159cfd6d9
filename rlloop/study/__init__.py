"""The collapse study: comparison of runs, the verdict on collapse, reports, and engines that drift on purpose."""
