"""A run's folder, and the sinks, console and plots that are fed from it."""
