"""A taskset with an environment of its own, of two turns. `rewrites`: it changes what the policy said in between."""

import verifiers.v1 as vf


class TalkData(vf.TaskData):
    pass


class TalkTask(vf.Task[TalkData, vf.State, vf.TaskConfig]):
    pass


class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            first = await interaction.turn()
            second = await interaction.turn("again")
        said = (first.last_reply or "") + (second.last_reply or "")
        interaction.trace.record_reward("length", len(said) % 5 / 5, 1.0)


class Talks(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self):
        for i in range(12):
            yield TalkTask(TalkData(name=f"t{i}", prompt=f"say {i}"), self.config.task)


__all__ = ["TalkEnv", "Talks"]
