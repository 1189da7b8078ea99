"""Runs LiteLLM, LangChain, LlamaIndex and llm against URL and prints what they got as JSON.

Usage: python python_apps.py URL KEY MODEL, in an environment with `requirements.txt` of this folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPT = "Tell me a story."
MAX_TOKENS = 16


def litellm_answers(url: str, key: str, model: str) -> dict[str, Any]:
    import litellm

    chat = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "api_key": key,
    }
    whole = litellm.completion(model=f"openai/{model}", api_base=f"{url}/v1", **chat)
    pieces = litellm.completion(model=f"hosted_vllm/{model}", api_base=f"{url}/v1", stream=True, **chat)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    message = litellm.completion(model=f"anthropic/{model}", api_base=url, **chat)
    embedding = litellm.embedding(model=f"openai/{model}", input=["a"], api_base=f"{url}/v1", api_key=key)
    return {
        "texts": [whole.choices[0].message.content, streamed, message.choices[0].message.content],
        "embedding": len(embedding.data[0]["embedding"]),
    }


def langchain_answers(url: str, key: str, model: str) -> dict[str, Any]:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    class Point(BaseModel):
        x: int
        y: int

    openai = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_tokens=MAX_TOKENS, temperature=0)
    anthropic = ChatAnthropic(
        model_name=model,
        base_url=url,
        api_key=key,
        max_tokens_to_sample=MAX_TOKENS,
        temperature=0,
        timeout=60,
        stop=None,
    )
    longer = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_tokens=100, temperature=0)
    called = longer.bind_tools([add], tool_choice="add").invoke(PROMPT).tool_calls[0]
    point = longer.with_structured_output(Point, method="json_schema").invoke(PROMPT)
    streamed = "".join(str(chunk.text) for chunk in anthropic.stream(PROMPT))

    async def at_once() -> list[str]:
        return [answer.content for answer in await openai.abatch([PROMPT] * 3)]

    return {
        "texts": [openai.invoke(PROMPT).content, anthropic.invoke(PROMPT).content, streamed, *asyncio.run(at_once())],
        "call": called["args"],
        "point": [point.x, point.y],
    }


def llama_index_answers(url: str, key: str, model: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key=key, is_chat_model=True, max_tokens=MAX_TOKENS, temperature=0
    )
    messages = [ChatMessage(role="user", content=PROMPT)]
    streamed = "".join(chunk.delta or "" for chunk in llm.stream_chat(messages))
    return {"texts": [llm.chat(messages).message.content, streamed]}


def llm_answers(url: str, key: str, model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        entry = {"model_id": "tandem", "model_name": model, "api_base": f"{url}/v1", "api_key_name": "tandem"}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
        import llm

        options = {"max_tokens": MAX_TOKENS, "temperature": 0}
        found = llm.get_model("tandem")
        whole = found.prompt(PROMPT, key=key, stream=False, **options).text()
        streamed = "".join(found.prompt(PROMPT, key=key, **options))
    return {"texts": [whole, streamed]}


if __name__ == "__main__":
    makers = [litellm_answers, langchain_answers, llama_index_answers, llm_answers]
    print(json.dumps({make.__name__: make(*sys.argv[1:4]) for make in makers}))
