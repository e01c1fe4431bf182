"""What llama.cpp makes of texts with a real model, as one JSON document."""

import json
import sys
import urllib.request

import xllamacpp

PATH, TEXTS = sys.argv[1], json.loads(sys.argv[2])

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity, params.port = PATH, 512, 1, -1, 0
server = xllamacpp.Server(params)


def tokens_of(text: str, add_special: bool) -> list[int]:
    body = json.dumps({"content": text, "add_special": add_special}).encode()
    request = urllib.request.Request(server.listening_address + "/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


print("\n" + json.dumps([[tokens_of(text, special) for special in (False, True)] for text in TEXTS]), flush=True)
