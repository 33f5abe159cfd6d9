"""Configuration: dataclasses without torch, one module for each section."""
