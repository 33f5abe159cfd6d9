"""Reinforcement learning from pictures: see `task.Pictures`."""
