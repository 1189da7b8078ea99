"""Gets an answer as JSON of a schema: here that of a Pydantic model. No prompt has to beg for it."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")


class Ticket(BaseModel):
    model_config = ConfigDict(extra="forbid")

    topic: Literal["billing", "delivery", "other"]
    is_urgent: bool
    priority: Literal[1, 2, 3]


client = OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id
answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "My parcel is three weeks late. Please help today!"}],
    response_format=Ticket,
    max_tokens=200,
    temperature=0,
)
print(repr(answer.choices[0].message.parsed))
