"""The OpenAPI document and the page that shows it."""

import json

from support.gateway.rest_harness import rest_side, say


def references(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


async def test_the_document_lists_every_route_and_all_its_references_resolve():
    async with rest_side() as rest:
        answer = await rest.request("GET", "/openapi.json")
    document = answer.json
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/health", "/ready", "/version", "/metrics", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
        "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items",
        "/v1/conversations", "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "/inference/v1/generate", "/openapi.json", "/docs", "/redoc", "/ping", "/load",
        "/abort_requests", "/server_info", "/invocations", "/v1/chat/completions/batch", "/v1/chat/completions/render",
        "/v1/completions/render", "/v1/chat/completions/derender", "/v1/completions/derender",
        "/v1/chat/completions/{completion_id}",
            "/v1/chat/completions/{completion_id}/messages",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel",
    }  # fmt: skip
    for reference in set(references(document)):
        start, section, kind, name = reference.split("/")
        assert (start, section) == ("#", "components")
        assert name in document["components"][kind]
    identifiers = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(identifiers) == len(set(identifiers))


async def test_the_bounds_of_fields_are_in_the_document():
    async with rest_side() as rest:
        schemas = (await rest.request("GET", "/openapi.json")).json["components"]["schemas"]
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in fields["temperature"]["anyOf"]
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]


async def test_parameters_bodies_and_errors_are_in_the_document():
    async with rest_side() as rest:
        document = (await rest.request("GET", "/openapi.json")).json
    paths, responses = document["paths"], document["components"]["responses"]
    page = paths["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [one["name"] for one in page if "in" in one] == ["response_id", "limit", "order", "after", "include"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert ("requestBody" in operation) == (method == "post" and not path.endswith(("/cancel", "/ping")))
            assert {"200", "400", "500"} <= set(operation["responses"])
            assert ("529" in operation["responses"]) == path.startswith(("/v1/messages", "/v1/models"))
    assert "Retry-After" in responses["Error429"]["headers"]
    assert responses["AnthropicError400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorResponse")
    assert "ReadinessError503" in responses


async def test_fields_that_are_refused_take_null_only():
    async with rest_side() as rest:
        schemas = (await rest.request("GET", "/openapi.json")).json["components"]["schemas"]
        fields = schemas["ChatCompletionRequest"]["properties"]
        refused = [name for name, field in fields.items() if field.get("type") == "null"]
        assert "audio" in refused
        for name in refused:
            answer = await rest.chat(**{name: ["x"]})
            assert (answer.status, answer.error["param"].partition(".")[0]) == (400, name)


async def test_answers_have_just_the_fields_of_the_document():
    async with rest_side(say("x")) as rest:
        schemas = (await rest.request("GET", "/openapi.json")).json["components"]["schemas"]
        chat = (await rest.chat()).json
        events = (await rest.chat(stream=True, stream_options={"include_usage": True})).events
        text = (await rest.complete()).json
        error = (await rest.chat(n=0)).json
    # Where asked for.
    extras = {"prompt_token_ids", "prompt_logprobs", "prompt_text", "metrics", "assistant_tokens_mask"}
    assert set(chat) == set(schemas["ChatCompletion"]["properties"]) - extras
    assert set(chat["choices"][0]) == set(schemas["ChatChoice"]["properties"]) - {"token_ids"}
    assert set(text) == set(schemas["Completion"]["properties"]) - extras
    assert set(error["error"]) == set(schemas["ErrorFields"]["properties"])
    for event in events:
        assert set(event) == set(schemas["ChatCompletionChunk"]["properties"]) - extras


async def test_the_docs_page_loads_nothing_from_elsewhere():
    async with rest_side() as rest:
        answer = await rest.request("GET", "/docs")
    assert answer.headers["content-type"].startswith("text/html")
    page = answer.body.decode()
    assert "/openapi.json" in page
    assert "http://" not in page
    assert "https://" not in page
    assert json.dumps("3.1.0") not in page
