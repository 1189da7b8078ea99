"""Asks about an image. It needs a model that takes images (docs/models.md), and the path of a picture:

python examples/image.py photo.jpg
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")

picture = Path(sys.argv[1])
kind = mimetypes.guess_type(picture)[0]
data_url = f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"
client = OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model,
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url}},
                {"type": "text", "text": "What is in this picture?"},
            ],
        }
    ],
    max_tokens=64,
    temperature=0,
)
assert answer.usage is not None
print(f"{answer.usage.prompt_tokens} prompt tokens, most of them the picture")
print(answer.choices[0].message.content)
