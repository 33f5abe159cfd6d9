"""Messages in a text that a chat template rendered, found by the markers of the usual families."""

from __future__ import annotations

import re

# Each begins a message: ChatML (Qwen, SmolLM), Llama 3, Gemma, gpt-oss, Kimi, GLM and Phi, DeepSeek, Mistral.
BEGIN = re.compile(
    r"<\|im_start\|>(?P<chatml>\w+)[^\n<]*\n?"
    r"|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>\n*"
    r"|<start_of_turn>(?P<gemma>\w+)\n?"
    r"|<\|start\|>(?P<harmony>[\w.]+)(?:[^<]|<\|channel\|>)*<\|message\|>"
    r"|<\|im_(?:system|user|assistant)\|>(?P<kimi>\w+)<\|im_middle\|>"
    r"|<\|(?P<glm>system|user|assistant|observation|tool)\|>\n?"
    r"|<｜(?P<deepseek>User|Assistant)｜>"
    r"|(?P<mistral>\[INST\])"
)
# Each ends one, and is not shown.
END = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>|<\|end\|>|<\|return\|>|<\|call\|>|<｜end▁of▁sentence｜>"
    r"|<\|endoftext\|>|<\|end_of_text\|>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|\[/INST\]|<bos>|<eos>|</?s>|\[gMASK\]<sop>"
    r"|<\|start\|>[\w.]*$"
)
# Where a picture stood, in Qwen's, Kimi's and Gemma's templates.
PICTURE = re.compile(
    r"<\|vision_start\|>(?:<\|(?:image|video)_pad\|>)+<\|vision_end\|>"
    r"|<\|media_begin\|>.*?<\|media_end\|>|<start_of_image>"
)
ROLES = {"model": "assistant", "observation": "tool", "ipython": "tool", "developer": "system", "[inst]": "user"}
REPLY = re.compile(r"^\s*<tool_response>\s*(.*?)\s*</tool_response>\s*$", re.DOTALL)
CALL = re.compile(
    r"""<tool_call>.*?["']name["']\s*:\s*["']([^"']+)|<function=([\w.-]+)>|<\|channel\|>\w+ to=([\w.]+)""", re.DOTALL
)


def messages_of(text: str, first: str = "prompt") -> list[tuple[str, str]]:
    """(role, content) of each message. `first`: the role of what stands before the first marker. Empty ones are left
    out."""
    messages, role, at = list[tuple[str, str]](), first, 0
    for match in [*BEGIN.finditer(text), None]:
        content = plain(text[at : match.start() if match else len(text)])
        reply = REPLY.match(content)
        if content:
            messages.append(("tool", reply[1]) if reply else (role, content))
        if match:
            name = next(filter(None, match.groups()), "").lower()
            role, at = ROLES.get(name, name), match.end()
    return messages


def plain(text: str) -> str:
    """A message's text without the markers that end it."""
    return END.sub("", text).strip()


def question_of(prompt: str, most: int) -> str:
    """Short text of a prompt for lists: the last message not written by the policy; without markers, the prompt's
    end. At most `most` characters, without placeholders of pictures."""
    messages = messages_of(PICTURE.sub("", prompt))
    asked = [content for role, content in messages if role != "assistant"]
    if not asked:
        return ""
    if len(messages) == 1 and messages[0][0] == "prompt":
        return asked[-1][-most:]
    return asked[-1][:most]


def calls_in(text: str) -> list[str]:
    """Names of the tools that a turn calls."""
    return [next(filter(None, match.groups()), "") for match in CALL.finditer(text)]
