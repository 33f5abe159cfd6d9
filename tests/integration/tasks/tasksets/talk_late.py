"""Episodes of two turns; those of the second task that is trained wait in between until the first step is over."""

import asyncio
from pathlib import Path

import verifiers.v1 as vf

HELD_OUT = ("t0", "t1", "t2", "t3")
seen: list[str] = []  # names of tasks, in the order of their first episodes


class TalkData(vf.TaskData):
    pass


class TalkTask(vf.Task[TalkData, vf.State, vf.TaskConfig]):
    pass


class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        if task.data.name not in (*HELD_OUT, *seen):
            seen.append(task.data.name)
        late = task.data.name in seen[1:2]
        async with agents.player.interaction(task) as interaction:
            first = await interaction.turn()
            while late and not list(Path("run/rollouts").glob("*.zst")):
                await asyncio.sleep(0.02)
            second = await interaction.turn("again")
        said = (first.last_reply or "") + (second.last_reply or "")
        interaction.trace.record_reward("length", len(said) % 5 / 5, 1.0)


class Talks(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self):
        for i in range(12):
            yield TalkTask(TalkData(name=f"t{i}", prompt=f"say {i}"), self.config.task)


__all__ = ["TalkEnv", "Talks"]
