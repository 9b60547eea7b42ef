"""A reward of your own: a language model judges the responses, behind a server with OpenAI's
interface, such as vLLM's.

Copy this file and write your question. The guide docs/adding_a_reward.md explains it.

    pip install openai
    export JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B OPENAI_API_KEY=none
    python -m maxrl_fast.train --task gsm8k --model DIR --reward judge.py:judge
        --reward-env JUDGE_URL,JUDGE_MODEL,OPENAI_API_KEY --reward-seconds 120
"""

import os
import re

from openai import AsyncOpenAI

QUESTION = """Question: {prompt}
Correct answer: {answer}
Response: {response}
How correct is the response? End with "Score: " and a number from 0 to 1."""
# as in "**Score:** 8" or "score 1e-3"; not the 8 of "8,5" or the 1 of "1,000"
SCORE = re.compile(r"(?i)score\W*?([-+]?\d*\.?\d+(?:e[-+]?\d+)?)(?![.,_]?\d)")

# One client for all calls of a worker, which run in one event loop, --reward-concurrency at a time.
# It asks again, with growing pauses, where the server is busy or the connection breaks.
CLIENT = AsyncOpenAI(
    base_url=os.environ["JUDGE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    timeout=60.0,
    max_retries=3,
)


async def judge(prompt, response: str, answer, **columns) -> float:
    """Return the last score in the judge's reply. A reply without one is a failure, and no reward
    of 0.
    """
    if not isinstance(prompt, str):  # chat messages
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    question = QUESTION.format(prompt=prompt, answer=answer, response=response)
    completion = await CLIENT.chat.completions.create(
        model=os.environ["JUDGE_MODEL"],
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
    )
    reply = completion.choices[0].message.content or ""
    scores = SCORE.findall(reply)
    if not scores:
        raise ValueError(f"the judge's reply must end with a score, got {reply[-200:]!r}")
    return float(scores[-1])
