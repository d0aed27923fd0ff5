"""Uses a server as an agent of LangChain does: python langchain_client.py BASE_URL KEY MODEL. Needs langchain and langchain-openai."""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = {"messages": [{"role": "user", "content": "What is 2 + 2?"}]}
calls: list[tuple[int, int]] = []


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    calls.append((a, b))
    return a + b


def check_agent(base_url: str, key: str, model: str, uses_responses_api: bool) -> None:
    """It calls the tool once, and answers with what that returns: whole and streamed."""
    chat = ChatOpenAI(base_url=base_url, api_key=key, model=model, use_responses_api=uses_responses_api)
    agent = create_agent(chat, [add])
    calls.clear()
    check_messages(agent.invoke(QUESTION)["messages"])
    *_, last = agent.stream(QUESTION, stream_mode="values")
    check_messages(last["messages"])
    text = "".join(chunk.text for chunk, _ in agent.stream(QUESTION, stream_mode="messages") if chunk.type == "AIMessageChunk")
    assert text.strip() == "It is 4.", text
    assert calls == [(2, 2)] * 3, calls


def check_messages(messages: list[Any]) -> None:
    assert [each.type for each in messages] == ["human", "ai", "tool", "ai"], messages
    assert messages[1].tool_calls[0]["args"] == {"a": 2, "b": 2}
    assert (messages[2].content, messages[3].text.strip()) == ("4", "It is 4.")


def main(base_url: str, key: str, model: str) -> None:
    for name, uses_responses_api in (("chat", False), ("responses", True)):
        check_agent(base_url, key, model, uses_responses_api)
        print(f"agent-{name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
