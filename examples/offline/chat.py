"""Answers one chat, then a batch of chats, by the model's own template and then by another one."""

import sys
from pathlib import Path

from baton.llm import LLM

MODEL = str(Path(__file__).parents[2] / "models" / "storyteller-7m")

OTHER_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def main(model: str = MODEL) -> None:
    llm = LLM(model=model, max_model_len=512)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 24, 0.0
    chat = [
        {"role": "user", "content": "Tell me a story about a dog."},
        {"role": "assistant", "content": "Once there was a dog named Max."},
        {"role": "user", "content": "Tell me more."},
    ]
    show("one chat", llm.chat(chat, params, use_tqdm=False))
    show("three chats", llm.chat([chat, chat[:1], chat], sampling_params=params, use_tqdm=True))
    show("another template", llm.chat(chat[:1], params, chat_template=OTHER_TEMPLATE, use_tqdm=False))


def show(title: str, outputs) -> None:
    print(f"{title}:")
    for output in outputs:
        print(f"  {len(output.prompt_token_ids)} tokens -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
