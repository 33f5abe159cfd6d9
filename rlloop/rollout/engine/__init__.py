"""The embedded engine: scheduler, paged cache, requests."""
